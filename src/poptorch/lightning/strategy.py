"""`IPUStrategy`: runs the steps of a LightningModule as compiled programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import poptorch
from poptorch.lightning import reports
from poptorch.lightning.checks import accumulation_of, check_clipping, check_module, check_optimisation
from poptorch.lightning.loaders import converted, short_shapes
from poptorch.lightning.module import LightningIPUModule
from poptorch.lightning.options import Clipping, created_options, forward_only, one_micro_batch, training_options
from poptorch.lightning.packages import Lightning
from poptorch.lightning.processes import Processes
from poptorch.lightning.results import Batching
from poptorch.lightning.steps import Step
from poptorch.lightning.watch import HostWatch, numbers_of

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

NAME = "ipu_strategy"
_CPU = torch.device("cpu")


class StrategyBehaviour(_Base):
    """What `IPUStrategy` adds to the strategy for parallel devices of either package."""

    package: Lightning
    accelerator_class: type
    precision_class: type
    strategy_name = NAME
    given: dict[str, Any]  # arguments of the constructor

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        arguments = inspect.signature(cls.__init__).bind(self, *args, **kwargs).arguments
        self.given = dict(list(arguments.items())[1:])
        return self

    def __init__(
        self,
        accelerator: Any = None,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: str | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        training_opts: poptorch.Options | None = None,
        inference_opts: poptorch.Options | None = None,
        *,
        autoround_num_ipus: bool = True,
        uneven_eval_batches: str = "run",
        reduce_outputs: bool = True,
    ) -> None:
        """A strategy for `Trainer(strategy=...)`.

        Args:
            accelerator: an `IPUAccelerator`, if the Trainer is not told by `accelerator="ipu"`.
            device_iterations: weight updates (in evaluation: micro-batches) that one Lightning batch makes.
            autoreport: write a report of each run.
            autoreport_dir: the folder for reports, which implies `autoreport`.
            parallel_devices: one device per replica; the Trainer knows them from `devices=`.
            cluster_environment: for Lightning only.
            checkpoint_io: how checkpoints are written.
            precision_plugin: an `IPUPrecision`, if the Trainer is not told by `precision=`.
            training_opts: options of the training executor, used as they are.
            inference_opts: options of the executors for validation, testing and predicting, used as they are.
            autoround_num_ipus: reserve the next power of two of IPUs.
            uneven_eval_batches: `"run"` evaluates the rows that do not fill a batch, `"drop"` leaves them out.
            reduce_outputs: average results over micro-batches; False gives the results of the executor as they are.
        """
        fail = self.package.MisconfigurationException
        if not isinstance(device_iterations, int) or device_iterations < 1:
            raise fail(f"`device_iterations` is a number, at least 1, not {device_iterations!r}.")
        if uneven_eval_batches not in ("run", "drop"):
            raise fail(f"`uneven_eval_batches` is 'run' or 'drop', not {uneven_eval_batches!r}.")
        for name, given in (("training_opts", training_opts), ("inference_opts", inference_opts)):
            if given is not None and not isinstance(given, poptorch.Options):
                raise TypeError(f"`{name}` is a poptorch.Options, not a {type(given).__name__}.")
        if not self.accelerator_class.is_available():
            raise fail("The IPU Accelerator requires IPU devices to run.")
        self._processes: Processes | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.device_iterations = device_iterations
        self.autoreport = autoreport or autoreport_dir is not None
        self.autoreport_dir = autoreport_dir
        self._user_options = {True: training_opts, False: inference_opts}  # for training or not
        self._own_options: dict[bool, poptorch.Options] = {}
        self._auto_rounds, self._runs_remainder = autoround_num_ipus, uneven_eval_batches == "run"
        self._reduces = reduce_outputs
        self.poptorch_models: dict[Any, poptorch.PoplarExecutor] = {}
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._active: Step | None = None
        self._undo: list[Callable[[], None]] = []
        self._is_in_optimizer_step = False
        self._accumulation = 1
        self._trains = False  # whether there is an optimiser
        self._trained: tuple[Any, ...] = ()
        self._numbers: list[Any] = []
        self._seen: dict[int, list[int]] = {}  # step → versions of the tensors that it last ran with
        if self.autoreport:
            reports.request(autoreport_dir)

    # ---- what Lightning asks

    @property
    def root_device(self) -> torch.device:
        """Where batches and results are: programs read and write the memory of the host."""
        return _CPU

    def model_to_device(self) -> None:
        """Nothing: programs work on the parameters where they are."""

    @property
    def precision_plugin(self) -> Any:
        """The precision, always an `IPUPrecision`."""
        return self._precision_plugin if self._precision_plugin is not None else self.precision_class()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, self.precision_class):
            precision_plugin = self.precision_class(precision_plugin.precision)
        self._precision_plugin = precision_plugin

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the name known."""
        strategy_registry.register(NAME, cls, description="compiled steps on emulated IPUs", override=True)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """The batch after the user's hooks, in the types of the precision."""
        return self.precision_plugin.convert_input(super().batch_to_device(batch, _CPU, dataloader_idx))

    # ---- processes

    @property
    def processes(self) -> Processes:
        """This process and its siblings."""
        if self._processes is None:
            self._processes = Processes(self.package, self._user_options[True] or self._user_options[False])
        return self._processes

    def set_world_ranks(self) -> None:
        """Tell Lightning's helpers which process this is."""
        self.package.set_rank(self.global_rank)

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.processes.count

    @property
    def global_rank(self) -> int:
        """Which of them this one is."""
        return self.processes.index

    @property
    def local_rank(self) -> int:
        """Which of those on this machine this one is."""
        return self.processes.local_index

    @property
    def node_rank(self) -> int:
        """Machines are not counted."""
        return 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes checkpoints and logs."""
        return self.global_rank == 0

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A value combined with those of the other processes."""
        return self.processes.reduce(tensor, reduce_op, group)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other processes."""
        self.processes.wait()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object that one process has."""
        return self.processes.broadcast(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all processes."""
        return self.processes.gather(tensor, group)

    # ---- options

    @property
    def training_opts(self) -> poptorch.Options:
        """The options of training: those of the user, or what the arguments of the Trainer stand for."""
        return self._options(training=True)

    @property
    def inference_opts(self) -> poptorch.Options:
        """The options of validation, testing and predicting."""
        return self._options(training=False)

    def _options(self, *, training: bool) -> poptorch.Options:
        given = self._user_options[training]
        if given is not None:
            return given
        if training not in self._own_options:
            self._own_options[training] = created_options(
                device_iterations=self.device_iterations,
                replicas=len(self.parallel_devices or [None]),
                accumulation=self._accumulation if training else 1,
                auto_round=self._auto_rounds,
            )
        return self._own_options[training]

    @property
    def replication_factor(self) -> int:
        """How many replicas the current stage has; before a run, those of the user's options or of `devices=`."""
        if self.poptorch_models and self._trainer.state.stage is not None:
            return self._options(training=self._trainer.training).replication_factor
        for given in self._user_options.values():
            if given is not None:
                return given.replication_factor
        return len(self.parallel_devices or [])

    @property
    def updates_per_step(self) -> int:
        """How many weight updates one batch of Lightning makes."""
        return self.training_opts.device_iterations

    def micro_batches_per_step(self, stage: Any) -> int:
        """How many micro-batches one batch of Lightning holds."""
        training = stage == self.package.RunningStage.TRAINING
        return Batching.of(self._options(training=training), training=training).micro_batches

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ---- life cycle

    def setup_environment(self) -> None:
        """First event of a run: forget the last one, and be ready for hooks that ask for loaders."""
        self._release()
        super().setup_environment()
        trainer = self._trainer
        self._own_options.clear()
        self._steps.clear()
        self.poptorch_models = {}
        self.processes.connect()
        self._undo.append(self.processes.disconnect)
        self._take_over_loaders(trainer)
        self._accumulation = accumulation_of(self.package, trainer)
        if trainer.state.fn == self.package.TrainerFn.FITTING:
            before = trainer.accumulate_grad_batches
            self._warn_about_contradictions(trainer)
            trainer.accumulate_grad_batches = 1  # a batch of the loader is a whole update
            self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", before))

    def _warn_about_contradictions(self, trainer: Any) -> None:
        given = self._user_options[True]
        if given is None:
            return
        devices, accumulation = len(self.parallel_devices or []), given.Training.gradient_accumulation
        if self._devices_are_explicit and devices != given.replication_factor:
            self.package.warn(
                f"`Trainer(devices={devices})` is ignored: the training options say "
                f"replicationFactor({given.replication_factor})."
            )
        if self._accumulation not in (1, accumulation):
            self.package.warn(
                f"`Trainer(accumulate_grad_batches={self._accumulation})` is ignored: the training options say "
                f"Training.gradientAccumulation({accumulation})."
            )

    _devices_are_explicit = False  # set by whoever reads the arguments of the Trainer

    def setup(self, trainer: Any) -> None:
        """Make the optimiser and the executors; nothing compiles before the first batch."""
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        check_module(self.package, module)
        stages, fitting = self.package.RunningStage, self.package.TrainerFn.FITTING
        self.model = LightningIPUModule(module)
        self._watch, self._seen = HostWatch(module, trainer), {}
        if trainer.state.fn != fitting:
            self._evaluation_step(trainer.state.stage, 0)
            return
        check_optimisation(self.package, module, self.optimizers)
        self._disable_zero_grad(module)
        self.poptorch_models[stages.TRAINING] = self._training_step().executor
        if trainer.enable_validation:
            executor = self._evaluation_step(stages.VALIDATING, 0).executor
            if trainer.num_sanity_val_steps > 0:
                self.poptorch_models[stages.SANITY_CHECKING] = executor

    def _disable_zero_grad(self, module: Any) -> None:
        """There are no gradients to forget: Lightning skips what cannot be called."""
        module.zero_grad()
        vars(module)["optimizer_zero_grad"] = None
        self._undo.append(lambda: vars(module).pop("optimizer_zero_grad", None))

    def teardown(self) -> None:
        """Last event of a run, however it ended: the module and the Trainer are as they were."""
        if self.autoreport and self.poptorch_models:
            reports.write(self.autoreport_dir, self.poptorch_models)
        self._release()
        super().teardown()

    def _release(self) -> None:
        for step in self._steps.values():
            step.executor.destroy()
        self._active = None
        while self._undo:
            self._undo.pop()()

    # ---- executors

    def _training_step(self) -> Step:
        key = (self.package.RunningStage.TRAINING,)
        if key not in self._steps:
            self._steps[key] = self._new_training_step()
        return self._steps[key]

    def _new_training_step(self) -> Step:
        (optimizer,) = self.optimizers or [None]
        clipping = self._watch.clipping()
        check_clipping(self.package, clipping, self.training_opts, optimizer)
        self._trains = optimizer is not None and not isinstance(optimizer, self.package.MockOptimizer)
        if optimizer is None or not self._trains:
            return self._new_forward_only_step()
        scales = self.precision_plugin.precision == "16-mixed" and self._user_options[True] is None
        scales = scales and getattr(optimizer, "loss_scaling", 1.0) == 1.0
        options = training_options(self.training_opts, clipping, scales_loss=scales)
        self._numbers, self._trained = numbers_of(optimizer), self._watch.shape_of_training(optimizer)
        return self._new_step(poptorch.trainingModel(self._wrapper, options, optimizer), training=True)

    def _new_forward_only_step(self) -> Step:
        options = forward_only(training_options(self.training_opts, Clipping(None), scales_loss=False))
        return self._new_step(poptorch.inferenceModel(self._wrapper, options), training=True)

    def _evaluation_step(self, stage: Any, dataloader_idx: int, *, remainder: Any = None) -> Step:
        """The step of a stage and a loader; what is left at the end of the data has its own, by its shapes."""
        stages = self.package.RunningStage
        stage = stages.VALIDATING if stage == stages.SANITY_CHECKING else stage
        key = (stage, dataloader_idx, remainder)
        if key not in self._steps:
            options = self.inference_opts if remainder is None else one_micro_batch(self.inference_opts)
            executor = poptorch.inferenceModel(self._wrapper, options)
            self._steps[key] = self._new_step(executor, training=False, is_predicting=stage == stages.PREDICTING)
            if key == (stage, 0, None):
                self.poptorch_models[stage] = executor
        return self._steps[key]

    def _new_step(self, executor: poptorch.PoplarExecutor, *, training: bool, is_predicting: bool = False) -> Step:
        return Step(
            self.package,
            self._wrapper,
            executor,
            training=training,
            combines=self._reduces and not is_predicting,
            default_dtype=self.precision_plugin.default_dtype,
        )

    @property
    def _wrapper(self) -> LightningIPUModule:
        assert isinstance(self.model, LightningIPUModule)
        return self.model

    def _activate(self, step: Step | None) -> None:
        """Let one step have its IPUs, and no other."""
        if self._active is not step:
            for other in self._steps.values():
                if other is not step and other.executor.isAttachedToDevice():
                    other.executor.detachFromDevice()
            self._active = step

    def _start(self, stage: Any) -> None:
        """A stage begins: its executor takes its IPUs, and with them the weights as they are now."""
        self._activate(None)
        self._seen.clear()
        executor = self.poptorch_models.get(stage)
        if executor is not None and executor.isCompiled() and not executor.isAttachedToDevice():
            executor.attachToDevice()

    def on_train_start(self) -> None:
        self._start(self.package.RunningStage.TRAINING)

    def on_validation_start(self) -> None:
        self._start(self.package.RunningStage.VALIDATING)

    def on_test_start(self) -> None:
        self._start(self.package.RunningStage.TESTING)

    def on_predict_start(self) -> None:
        self._start(self.package.RunningStage.PREDICTING)

    def on_train_end(self) -> None:
        self._detach_all()

    def on_validation_end(self) -> None:
        self._detach_all()

    def on_test_end(self) -> None:
        self._detach_all()

    def on_predict_end(self) -> None:
        self._detach_all()

    def _detach_all(self) -> None:
        for step in self._steps.values():
            if step.executor.isAttachedToDevice():
                step.executor.detachFromDevice()
        self._active = None

    def copy_weights_to_host(self) -> None:
        """Bring what programs have changed to the module; training programs work on the module itself."""
        for step in self._steps.values():
            step.executor.copyWeightsToHostIfNeeded()

    def copy_weights_to_device(self) -> None:
        """Let all compiled programs use the weights that the module has now."""
        for step in self._steps.values():
            if step.executor.isCompiled():
                step.executor.copyWeightsToDevice()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the module, without traces of programs."""
        self.copy_weights_to_host()
        return super().lightning_module_state_dict()

    # ---- steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self._skips_updates:
            self._trainer.accumulate_grad_batches = 1  # schedulers of the accumulation set it in every epoch

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the training step, which updates the weights too."""
        self._is_in_optimizer_step = True
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_in_optimizer_step = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the training program."""
        if self._skips_updates:
            return self._run_forward_only(args)
        if not self._is_in_optimizer_step:
            raise self.package.MisconfigurationException(
                "`optimizer_closure` was called outside of `optimizer.step(closure=optimizer_closure)`: on IPUs a "
                "training step cannot run without updating the weights."
            )
        step = self._keep_up(self._training_step())
        self._activate(step)
        return step(args, self._counts())

    @property
    def _skips_updates(self) -> bool:
        return self._trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward

    def _run_forward_only(self, args: tuple[Any, ...]) -> Any:
        """A training step without an update, by which callbacks collect statistics of batch normalisation."""
        key = (self.package.RunningStage.TRAINING, "forward only")
        if key not in self._steps:
            self._steps[key] = self._new_forward_only_step()
        step = self._steps[key]
        self._activate(step)
        self._follow_host(step)
        result = step(args, self._counts())
        step.executor.copyWeightsToHostIfNeeded()
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the validation program."""
        return self._evaluate(args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the test program."""
        return self._evaluate(args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the predict program."""
        return self._evaluate(args)

    def _evaluate(self, args: tuple[Any, ...]) -> Any:
        dataloader_idx = (*args[2:], 0)[0]
        short = short_shapes(self._trainer._active_loop._combined_loader, args[0], dataloader_idx)
        step = self._evaluation_step(self._trainer.state.stage, dataloader_idx, remainder=short)
        self._activate(step)
        self._follow_host(step)
        result = step(args, self._counts())
        if step.executor.copyWeightsToHostIfNeeded():
            self._seen[id(step)] = self._watch.versions()
        return result

    def _counts(self) -> dict[str, int]:
        trainer = self._trainer
        loop = trainer._active_loop
        batch_idx = getattr(loop, "epoch_loop", loop).batch_progress.current.ready - 1  # not every step takes it
        return {"batch_idx": batch_idx, "current_epoch": trainer.current_epoch, "global_step": trainer.global_step}

    def _keep_up(self, step: Step) -> Step:
        """Let the program know what the host has changed since the last call; gives the step to use."""
        if not self._trains:
            return step
        (optimizer,) = self.optimizers
        if self._watch.shape_of_training(optimizer) != self._trained:
            step = self._replace_training_step(step)
        numbers = numbers_of(optimizer)
        if numbers != self._numbers:
            self._numbers = numbers
            step.executor.setOptimizer(optimizer)
        return step

    def _replace_training_step(self, step: Step) -> Step:
        """Train with another set of parameters, modes or limits; weights and optimiser state go on as they are."""
        if step.executor.isCompiled():
            self.package.warn(
                "poptorch compiles the training step again: which parameters are trained, the train or eval mode of a "
                "submodule, or the clipping of gradients has changed."
            )
        step.executor.destroy()
        stage = self.package.RunningStage.TRAINING
        new = self._steps[(stage,)] = self._new_training_step()
        self.poptorch_models[stage] = new.executor
        self._active = new
        return new

    def _follow_host(self, step: Step) -> None:
        """Take over weights that the host has changed since the last call, as averages swapped in by a callback.

        A change of `parameter.data` leaves no trace, so in each stage the first call looks at all of them.
        """
        versions = self._watch.versions()
        if self._seen.get(id(step)) != versions and step.executor.isAttachedToDevice():
            step.executor.copyWeightsToDevice()
        self._seen[id(step)] = versions

    # ---- loaders

    def _take_over_loaders(self, trainer: Any) -> None:
        """Convert the loaders of this Trainer where it prepares them, and knows what they are for."""
        connector = trainer._data_connector

        def prepare(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            return self._converted(dataloader, mode)

        connector._prepare_dataloader = prepare
        self._undo.append(lambda: vars(connector).pop("_prepare_dataloader", None))

    def process_dataloader(self, dataloader: Any) -> Any:
        """A loader that feeds whole calls."""
        return self._converted(dataloader, self._trainer.state.stage)

    def _converted(self, dataloader: Any, stage: Any) -> Any:
        stages = self.package.RunningStage
        training = stage == stages.TRAINING
        return converted(
            self.package,
            dataloader,
            self._options(training=training),
            training=training,
            keeps_remainder=self._runs_remainder,
            tracks_indices=stage == stages.PREDICTING,
        )


class PluginBehaviour(StrategyBehaviour):
    """What `IPUPlugin`, the strategy of Lightning 1.4 and 1.5, adds: its constructor."""

    def __init__(
        self,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: str | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        training_opts: poptorch.Options | None = None,
        inference_opts: poptorch.Options | None = None,
        *,
        autoround_num_ipus: bool = True,
        convert_model_to_half: bool = False,
    ) -> None:
        """A strategy for `Trainer(plugins=...)`; see `IPUStrategy`.

        Args:
            convert_model_to_half: weights and inputs in float16, whatever `precision=` says.
        """
        self.package.warn_deprecated("`IPUPlugin` is the older name of `poptorch.lightning.IPUStrategy`.")
        super().__init__(
            device_iterations=device_iterations,
            autoreport=autoreport,
            autoreport_dir=autoreport_dir,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=self.precision_class("16-true") if convert_model_to_half else None,
            training_opts=training_opts,
            inference_opts=inference_opts,
            autoround_num_ipus=autoround_num_ipus,
        )
        self.convert_model_to_half = convert_model_to_half
