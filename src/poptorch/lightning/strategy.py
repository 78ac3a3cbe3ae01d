"""`IPUStrategy`: runs the steps of a LightningModule as compiled programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import poptorch
from poptorch.lightning import reports
from poptorch.lightning.checks import accumulation_of, check_module, check_optimisation, warn_about_contradictions
from poptorch.lightning.loaders import converted
from poptorch.lightning.module import LightningIPUModule
from poptorch.lightning.options import created_options
from poptorch.lightning.packages import Lightning
from poptorch.lightning.processes import Processes
from poptorch.lightning.programs import Programs, RunPlan
from poptorch.lightning.results import Batching

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
    _devices_are_explicit = False  # set by whoever reads the arguments of the Trainer

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
        self._programs: Programs | None = None  # of the current run, or of the last one
        self._undo: list[Callable[[], None]] = []
        self._is_in_optimizer_step = False
        self._accumulation = 1
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
        self._programs = None
        self.processes.connect()
        self._undo.append(self.processes.disconnect)
        self._take_over_loaders(trainer)
        self._accumulation = accumulation_of(self.package, trainer)
        if trainer.state.fn == self.package.TrainerFn.FITTING:
            before = trainer.accumulate_grad_batches
            if (given := self._user_options[True]) is not None:
                devices = len(self.parallel_devices or []) if self._devices_are_explicit else None
                warn_about_contradictions(self.package, given, devices, self._accumulation)
            trainer.accumulate_grad_batches = 1  # a batch of the loader is a whole update
            self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", before))

    def setup(self, trainer: Any) -> None:
        """Make the optimiser and the executors; nothing compiles before the first batch."""
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        check_module(self.package, module)
        self.model = LightningIPUModule(module)
        self._programs = Programs(self.package, self.model, trainer, self._plan())
        if trainer.state.fn != self.package.TrainerFn.FITTING:
            self._programs.prepare_evaluation(trainer.state.stage)
            return
        check_optimisation(self.package, module, self.optimizers)
        self._disable_zero_grad(module)
        self._programs.prepare_training()
        if trainer.enable_validation:
            self._programs.prepare_evaluation(self.package.RunningStage.VALIDATING)
            if trainer.num_sanity_val_steps > 0:
                self._programs.prepare_evaluation(self.package.RunningStage.SANITY_CHECKING)

    def _plan(self) -> RunPlan:
        precision = self.precision_plugin
        return RunPlan(
            training=self.training_opts,
            inference=self.inference_opts,
            combines=self._reduces,
            may_scale_loss=precision.precision == "16-mixed" and self._user_options[True] is None,
            default_dtype=precision.default_dtype,
        )

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
        if self._programs is not None:
            self._programs.destroy()
        while self._undo:
            self._undo.pop()()

    # ---- programs

    @property
    def programs(self) -> Programs:
        """The programs of the current run."""
        assert self._programs is not None
        return self._programs

    @property
    def poptorch_models(self) -> dict[Any, poptorch.PoplarExecutor]:
        """The executors of the current run, or of the last one, by their stage."""
        return {} if self._programs is None else self._programs.models

    def on_train_start(self) -> None:
        self.programs.start(self.package.RunningStage.TRAINING)

    def on_validation_start(self) -> None:
        self.programs.start(self.package.RunningStage.VALIDATING)

    def on_test_start(self) -> None:
        self.programs.start(self.package.RunningStage.TESTING)

    def on_predict_start(self) -> None:
        self.programs.start(self.package.RunningStage.PREDICTING)

    def on_train_end(self) -> None:
        self.programs.detach()

    def on_validation_end(self) -> None:
        self.programs.detach()

    def on_test_end(self) -> None:
        self.programs.detach()

    def on_predict_end(self) -> None:
        self.programs.detach()

    def copy_weights_to_host(self) -> None:
        """Bring what programs have changed to the module; training programs work on the module itself."""
        if self._programs is not None:
            self._programs.copy_weights_to_host()

    def copy_weights_to_device(self) -> None:
        """Let all compiled programs use the weights that the module has now."""
        if self._programs is not None:
            self._programs.copy_weights_to_device()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the module, without traces of programs."""
        self.copy_weights_to_host()
        return super().lightning_module_state_dict()

    # ---- steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self._skips_updates:
            self._trainer.accumulate_grad_batches = 1  # schedulers of the accumulation set it in every epoch

    @property
    def _skips_updates(self) -> bool:
        return self._trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward

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
            return self.programs.train_nothing(args)
        if not self._is_in_optimizer_step:
            raise self.package.MisconfigurationException(
                "`optimizer_closure` was called outside of `optimizer.step(closure=optimizer_closure)`: on IPUs a "
                "training step cannot run without updating the weights."
            )
        return self.programs.train(args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the validation program."""
        return self.programs.evaluate(args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the test program."""
        return self.programs.evaluate(args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the predict program."""
        return self.programs.evaluate(args)

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
