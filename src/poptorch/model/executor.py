"""`PoplarExecutor`: a wrapped model. It joins capture, compiler and runtime, and keeps track of who owns what."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from poptorch._logging import limit_repeats, logger
from poptorch.capture import holders_of
from poptorch.engines import CheckedEngine, choose_engine, return_freed_memory
from poptorch.errors import AnchorError, ArgumentError, Error, FileContentError, FileError, explain, nearest
from poptorch.executable import Executable
from poptorch.faults import FAULTS
from poptorch.ipu import announce
from poptorch.model import handles, saving, wrapped
from poptorch.model.arguments import ArgumentBinder, CallSpec, prepare
from poptorch.model.attachment import Attachment
from poptorch.model.buffers import updatable_buffers
from poptorch.model.build import Blueprint, build, build_loaded
from poptorch.model.checkpoints import Checkpoints
from poptorch.model.engine_use import EngineUse
from poptorch.model.graph_json import graph_json
from poptorch.model.grouping import ReplicaGroups
from poptorch.model.loading import Loaded, open_file
from poptorch.model.locking import Lock, one_at_a_time
from poptorch.model.measurements import Measurements
from poptorch.model.modes import Flags, flags_in_mode, flags_of, switched_warning
from poptorch.model.optimizers import GROUPS_CHANGED, Optimizers, OptimizerSet, needs_running_mean, with_running_mean
from poptorch.model.own_options import own_options
from poptorch.model.parameter_proxy import ParameterProxy
from poptorch.model.printing import module_repr
from poptorch.model.processes import Companions
from poptorch.model.replacement import inherit_state
from poptorch.model.synthetic import SyntheticInputs
from poptorch.model.variants import Variant, Variants
from poptorch.optim.plan import plan_optimizers
from poptorch.options import Options, resolve, validate
from poptorch.runtime import Session

_NOT_COMPILED = (
    "Model has not been compiled or has been destroyed. Call it, or call compile() with an example batch, first."
)


class PoplarExecutor(Checkpoints, EngineUse, Measurements):
    """A model that runs as a compiled program; made by `trainingModel` and `inferenceModel`, called like the model."""

    def __init__(
        self,
        model: nn.Module,
        options: Options | None,
        training: bool,
        poptorch_version: str | None = None,
        optimizer: Optimizers | None = None,
        user_model: nn.Module | None = None,
    ) -> None:
        """Wrap `model`; `user_model` is what `executor.model` shows, if that is another module around or inside it.

        `poptorch_version` is accepted for programs that construct executors themselves; there is one version only.
        """
        options = own_options(options, training=training)
        self._lock = Lock()
        self._training = training
        self._traced = model if training else copy.copy(model)
        self._user_model = self._traced if user_model is None or user_model is model else user_model
        self._original, self._original_attributes = model, dict(vars(model))
        self._options = options
        self._settings = resolve(options, training=training)
        checks = self._settings.precision.floating_point_checks
        self._engine = CheckedEngine() if checks else choose_engine(self._settings.engine.name)
        self._binder = ArgumentBinder(
            type(model).forward.__get__(model) if "forward" not in vars(model) else model.forward
        )
        self._optimizers = OptimizerSet()
        self.per_replica_params: dict[str, ReplicaGroups | tuple[Any, ...]] = {}
        self._warned: set[str] = set()
        self._synthetic = SyntheticInputs(self._settings.engine.synthetic_data, self._settings.engine.random_seed)
        self._companions = Companions(self._traced, self._settings)
        announce()
        self._attachment = Attachment(self._settings.placement, self._settings.batching.replicas)
        self._variants = Variants()
        self._forget()
        if optimizer is not None:
            self.setOptimizer(optimizer)
        if training:
            wrapped.remember(model, self)
            handles.attach(model, self)

    def _forget(self) -> None:
        """Back to the state before compilation."""
        self._current: Variant | None = None
        self._wanted: Flags | None = None  # of the program for the next call, if it need not be the current one
        self._variants.close()
        self._variants = Variants()
        self._scale_factor = torch.ones(())
        self._attachment.detach()

    @property
    def _session(self) -> Session | None:
        return None if self._current is None else self._current.session

    @property
    def _executable(self) -> Executable | None:
        return None if self._current is None else self._current.session.executable

    def _compiled(self) -> Variant:
        """The current program; raises if there is none."""
        if self._current is None:
            raise Error(_NOT_COMPILED)
        return self._current

    # ---- running

    @one_at_a_time
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: D × G × R micro-batches, and in training D weight updates. Compiles on first use."""
        if FAULTS.waiting is not None:
            FAULTS.strike()
        if self._attachment.is_offline:
            self._attachment.check_online()
        args, kwargs = self._binder.bind(args, kwargs)
        before = self._current
        if before is not None and not self._attachment.is_attached:
            self.attachToDevice()
        if self._optimizers.is_dirty:
            self.setOptimizer(self._optimizers.optimizers)
        try:
            tensors = self._inputs(self._tensors(args, kwargs))
            return self._run(self._compiled(), tensors)
        except BaseException as error:
            if isinstance(error, Exception):
                self._companions.refuse(self._current, error)
            self._forget_since(before)
            raise

    def _run(self, variant: Variant, tensors: list[torch.Tensor]) -> Any:
        if "mode" not in self._warned and (switched := variant.watch.switched()):
            self._warned.add("mode")
            logger.warning("%s", switched_warning(switched))
        if self._optimizers.has_other_groups and "groups" not in self._warned:
            self._warned.add("groups")
            logger.warning(GROUPS_CHANGED)
        self._companions.let_go(variant)
        if variant.state.has_changed(variant.watch):
            variant.bind()
        if variant.upgrade is not None:
            variant.upgrade_if_ready()
        self._optimizers.mark_step()
        variant.state.begin_call()
        outputs, variant.anchored, variant.trace = variant.session.run(tensors)
        variant.state.end_call()
        for output in outputs:
            output.backward = _refuse_backward  # pyright: ignore
        if self._settings.report.anchored:
            variant.anchored.update(self._optimizers.anchored(self._settings.report.anchors))
        if self._settings.report.counts_cycles:
            logger.info("Total number of IPU cycles: %d", self.cycleCount())
        return variant.result(outputs)

    def _forget_since(self, before: Variant | None) -> None:
        """After a call that failed: a program that it compiled and that never ran is as if it had not been."""
        failed = self._current
        if failed is None or failed is before or failed.trace is not None:
            return
        if before is None:
            self._forget()
        else:
            self._variants.remove(failed)
            self._current = before

    def _inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the program is fed: the tensors of the caller, or synthetic ones of the same shapes."""
        if self._settings.engine.synthetic_data:
            return self._synthetic.like(tensors)
        return prepare(tensors, self._warned)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, for which the current program is made; find or compile another one if it must be."""
        if self._current is None:
            self._compile(args, kwargs)
        current = self._compiled()
        flags = current.flags if self._wanted is None else self._wanted
        reason = "setOptimizer" if current.is_outdated else ""
        if flags == current.flags:
            try:
                tensors = current.call.tensors(args, kwargs)
                if not current.is_outdated:
                    return tensors
            except ArgumentError as mismatch:
                if not self._settings.engine.allows_shape_changes:
                    raise
                reason = mismatch.message.splitlines()[0]
        found = self._variants.find(flags, args, kwargs, exact=self._settings.engine.allows_shape_changes)
        if found is None:
            call = CallSpec.of(self._binder, args, kwargs)
            reason = reason or ("train()" if all(flags) else "eval()")
            logger.info("compiling again for %s: %s", call, reason)
            with self._companions.compiling(lambda: self._current):
                self._build(call, args, kwargs, reason, flags)
            self._variants.drop_outdated()
            return call.tensors(args, kwargs)
        self._switch(found)
        return found.call.tensors(args, kwargs)

    def _switch(self, variant: Variant) -> None:
        """Go on with another program, which starts from what the current one has left."""
        before = self._compiled()
        variant.state.take_over(before.state)
        if before.session.executable.written_by_steps:
            variant.bind()
        variant.session.random.go_on_from(before.session.random)
        self._current = variant

    # ---- train and eval

    def train(self, mode: bool = True) -> PoplarExecutor:
        """Run in training mode (or not) from the next call on; the flags of the module are left alone.

        The program of each mode is compiled once, when it is first needed.
        """
        if not isinstance(mode, bool):
            raise Error(f"train() takes True or False, not {mode!r}.")
        with self._lock.held:
            self._wanted = flags_in_mode(self._traced, mode)
        return self

    def eval(self) -> PoplarExecutor:
        """Run in evaluation mode from the next call on; the same as `train(False)`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model itself runs in training mode: that of the executor, or the module's until there is one."""
        with self._lock.held:
            return self._wanted[0] if self._wanted is not None else self._traced.training

    # ---- compiling

    @one_at_a_time
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments without running; the weights do not change."""
        if self._current is not None:
            logger.warning(
                "compile() is ignored: the model is already compiled. Call destroy() first to compile again."
            )
            return
        self._compile(*self._binder.bind(args, kwargs))

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the first program, if all processes of the program can, and begin with the same weights."""
        self._companions.connect(self._engine.name)
        with self._companions.compiling(lambda: self._current):
            self._compile_alone(args, kwargs)
        self._companions.start(self._compiled())

    def _compile_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        validate(self._options.toDict())
        limit_repeats(self._settings.report.repeats)
        updatable_buffers(self._settings, self._traced)
        if self._settings.report.counts_cycles and self._attachment.uses_model:
            raise Error("Cycle count logging is only supported on actual IPU hardware, not on the IPU model.")
        call = CallSpec.of(self._binder, args, kwargs)
        wrapped.take_attributes(self._traced, self._original, self._original_attributes)
        self._attachment.before_capture()
        wanted = self._wanted
        try:
            self._build(call, args, kwargs, "the first call", wanted or flags_of(self._traced))
            self._attachment.after_compilation()
        except BaseException:
            self._forget()
            self._wanted = wanted
            raise

    def _blueprint(self) -> Blueprint:
        return Blueprint(
            self._traced,
            self._settings,
            self._engine,
            self._optimizers,
            self.per_replica_params,
            self._scale_factor,
            self._warned,
            self._companions.seat,
        )

    def _build(self, call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, flags: Flags) -> None:
        """Make a program for this call the current one."""
        tensors = self._inputs(call.tensors(args, kwargs))
        variant = build(self._blueprint(), call, tensors, flags, reason, before=self._current, placed=self._placed)
        self._attachment.resize(variant.session.executable.ipus)
        self._variants.add(variant)
        self._current = variant
        self._connect_optimizers()
        if not self._attachment.is_offline:
            self._optimizers.anchored(self._settings.report.anchors)  # raises if there is no such number
        logger.info(
            "compiled a %s model for %s emulated IPU(s) on the %s engine",
            "training" if self._training else "inference",
            variant.session.executable.ipus,
            variant.engine,
        )

    def _placed(self, executable: Executable) -> None:
        """Before native code is made for the first program, which may take long, get the IPUs that it will run on."""
        if self._current is None:
            self._attachment.before_compilation(executable.ipus)

    # ---- files

    @one_at_a_time
    def compileAndExport(
        self, filename: str | os.PathLike[str], *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile for these arguments, and `save` the result; with an offline target no device is needed."""
        self.compile(*args, **kwargs)
        self.waitForNativeCode()
        self.save(filename, export_model=export_model)

    @one_at_a_time
    def save(self, filename: str | os.PathLike[str], export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model to a file: `poptorch.load` goes on with it, in a process that needs no class of it.

        Without `export_model` there is only the program, for `loadExecutable`.
        """
        variant = saving.savable(self._compiled())
        self.copyWeightsToHostIfNeeded()
        options, forward = self._options, self._binder.signature
        subject = saving.Subject(self._traced, forward, variant, options, self._optimizers, self._scale_factor)
        path = saving.target_file(filename)
        saving.save(subject, path, export_model=export_model, save_rng_state=save_rng_state)
        logger.debug("wrote %s", path)

    @one_at_a_time
    def loadExecutable(self, filename: str | os.PathLike[str], *, trust_code: bool = False) -> None:
        """Take the program from a file that was saved for an equal model, instead of compiling.

        Weights and the state of the optimiser are those of this model, not those of the file. `trust_code` is that of
        `poptorch.load`.
        """
        if self._current is not None:
            raise Error("the model is compiled already: call destroy() before loadExecutable().")
        self._adopt(lambda: open_file(filename, trusts_code=trust_code))

    def _adopt(self, load: Callable[[], Loaded]) -> None:
        """Make a program from a file the current one, if all processes of the program can."""
        self._companions.connect(self._engine.name)
        goes_on = False
        with self._companions.compiling(lambda: self._current):
            loaded = load()
            goes_on = loaded.random is not None
            self._companions.check(loaded.executable)
            self._adopt_alone(loaded)
        self._companions.start(self._compiled(), goes_on=goes_on)

    def _adopt_alone(self, loaded: Loaded) -> None:
        if loaded.trains is not self._training:
            kind, other = ("training", "inference") if loaded.trains else ("inference", "training")
            raise FileContentError(f"{loaded.path} holds a program for {kind}, and this model is wrapped for {other}.")
        limit_repeats(self._settings.report.repeats)
        wrapped.take_attributes(self._traced, self._original, self._original_attributes)
        self._attachment.before_capture()
        try:
            self._placed(loaded.executable)
            self._scale_factor.fill_(loaded.scale_factor)
            variant = build_loaded(self._blueprint(), loaded)
            self._variants.add(variant)
            self._current = variant
            self._connect_optimizers()
            self._attachment.after_compilation()
        except BaseException as error:
            self._forget()
            if isinstance(error, Error) or not isinstance(error, Exception):
                raise
            raise FileError(f"Invalid file {loaded.path}: {type(error).__name__}: {error}") from error

    def isCompiled(self) -> bool:
        """Whether there is a compiled program."""
        return self._current is not None

    def compilationTime(self) -> timedelta:
        """How long it took to compile the model; needs `Options.showCompilationProgressBar`, which is on by default."""
        self._compiled()
        if not self._settings.report.show_progress:
            raise Error(
                explain(
                    "the compilation time is only kept with the progress bar, and that is switched off.",
                    options="showCompilationProgressBar(False)",
                    fix="leave showCompilationProgressBar at True; without a terminal it prints nothing",
                )
            )
        return timedelta(seconds=sum(variant.seconds for variant in self._variants))

    def _debugGetPopartIR(self) -> str:
        """The compiled graph as JSON text: a dictionary whose `maingraph` lists the ops by name and type."""
        return graph_json(self._compiled().session.executable)

    # ---- life cycle

    @one_at_a_time
    def destroy(self) -> None:
        """Release the program and unwrap the model; it can be wrapped again, and calling it again compiles again."""
        if self._current is not None:
            self._forget()
            return_freed_memory()
        if wrapped.forget(self._original, self):
            handles.detach(self._original)

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and holds its device."""
        return self._current is not None and self._attachment.is_attached

    @one_at_a_time
    def attachToDevice(self) -> None:
        """Take the device again after `detachFromDevice`; changes made on the host meanwhile are picked up."""
        current = self._compiled()
        if self._attachment.is_attached:
            raise Error("Device is already attached: call detachFromDevice() first.")
        self._attachment.attach()
        if not current.is_outdated:
            current.refresh()

    @one_at_a_time
    def detachFromDevice(self) -> None:
        """Release the device; weights and optimiser state are on the host."""
        self._compiled()
        if not self._attachment.is_attached:
            raise Error("Device is not attached: it was detached before, and calling the model attaches it.")
        self._attachment.detach()
        for variant in self._variants:
            variant.stop_upgrading()

    # ---- weights and optimiser

    @one_at_a_time
    def copyWeightsToHost(self) -> None:
        """Bring the module up to date; one in training always is, unless processes have stages of it: then all call."""
        self._compiled().state.write_back()
        self._companions.fetch(self._compiled())

    @one_at_a_time
    def copyWeightsToHostIfNeeded(self) -> bool:
        """Like `copyWeightsToHost`, but tells whether anything had to be copied."""
        current = self._current
        is_complete = current is None or not (current.state.is_host_stale or current.state.has_rows_only)
        if is_complete and not self._companions.lacks_weights:
            return False
        self.copyWeightsToHost()
        return True

    @one_at_a_time
    def copyWeightsToDevice(self) -> None:
        """Let the program use the weights that the module has now."""
        current = self._compiled()
        if not current.is_outdated:
            current.refresh()

    @one_at_a_time
    def copyNamedBuffersToDevice(self) -> None:
        """Let the program use the values that the buffers of `Options.updatableNamedBuffers` have now."""
        current = self._compiled()
        names = updatable_buffers(self._settings, self._traced)
        if names is None:
            raise Error(
                explain(
                    "copyNamedBuffersToDevice() does not know which buffers to copy.",
                    fix='name them: Options.updatableNamedBuffers(["scale"])',
                )
            )
        current.refresh(names)

    @property
    def rng_state(self) -> list[int] | None:
        """The random numbers of the device as numbers that can be set again; the seed alone before the first call."""
        return self._compiled().session.random.words

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._compiled().session.random.words = list(state)

    def getTensorNames(self) -> list[str]:
        """The names of all tensors that `Options.anchorTensor` can ask for."""
        if self._current is None:
            raise AnchorError(_NOT_COMPILED)
        return [*self._current.session.executable.tensor_names, *self._optimizers.numbers()]

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """What the last call computed for the anchor of this name."""
        if self._current is None or self._current.trace is None:
            raise AnchorError(f"there is nothing for the anchor {short_name!r} yet: call the model first.")
        if short_name in self._current.anchored:
            return self._current.anchored[short_name]
        known = sorted(self._settings.report.anchors)
        raise AnchorError(f"{short_name!r} is no anchor of this model{nearest(short_name, known)}")

    def compilationReport(self) -> str:
        """What was compiled and why: one line per program, more than one only with `Options.allowShapeChanges`."""
        return self._variants.report()

    @one_at_a_time
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load weights into the model and use them from the next call on."""
        result = self._user_model.load_state_dict(state_dict, strict=strict)
        if self._current is not None:
            self.copyWeightsToDevice()
        return result

    @one_at_a_time
    def setOptimizer(self, optimizer: Optimizers) -> None:
        """Use the settings that the optimiser has now, for example after an LR scheduler.

        Each parameter gets the numbers of the group that holds it; what no group holds is not trained any more. Only if
        other parameters are trained than before, or other ones share their numbers, the next call compiles again.
        """
        if not self._training:
            raise AttributeError("an inference model has no optimiser: setOptimizer belongs to poptorch.trainingModel.")
        optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        automatic = self._settings.training.automatic_loss_scaling
        plans = plan_optimizers(optimizers, self._optimizers.plans, automatic_loss_scaling=automatic)
        if needs_running_mean(plans, self._settings, is_compiled=self._current is not None):
            self._options = with_running_mean(self._options)
            self._settings = resolve(self._options, training=True)
        variants = list(self._variants)
        holders = holders_of(self._traced, plans) if variants else {}
        accepted = [variant.state.accepts(plans, holders) for variant in variants]  # raises before anything has changed
        if variants:
            inherit_state(self._optimizers.optimizers, optimizers)
        for variant, is_accepted in zip(variants, accepted, strict=True):
            variant.is_outdated = not is_accepted
            if is_accepted:
                variant.state.go_on_with(optimizers, plans, holders)
        self._optimizers.become(optimizers, plans)
        quietly = bool(getattr(self._options, "relax_optimizer_attributes_checks", False))
        self._optimizers.report(self._traced, quietly=quietly)
        self._connect_optimizers()

    def _connect_optimizers(self) -> None:
        """Let the optimisers show what the program knows; one that never gets a device has nothing to show."""
        if self._current is not None and not self._attachment.is_offline:
            holders = holders_of(self._traced, self._optimizers.plans)
            self._current.state.connect(self._optimizers, holders, self._settings)

    # ---- looking like the model

    @property
    def model(self) -> nn.Module:
        """The PyTorch module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The options of this executor, frozen, with the output mode resolved."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_user_model")
        if model is None:
            raise AttributeError(name)
        value = getattr(model, name)
        if name not in model._parameters or value is None:
            return value
        return ParameterProxy(value, partial(self._group_replicas, name))

    def _group_replicas(self, name: str, groups: ReplicaGroups) -> None:
        if self._current is not None:
            raise Error(
                explain(
                    f"replicaGrouping of {name} comes too late: the model is compiled.",
                    fix="call it before the first call, or after destroy()",
                )
            )
        self.per_replica_params[name] = groups

    def __repr__(self) -> str:
        kind = "training" if self._training else "inference"
        state = "compiled" if self.isCompiled() else "not compiled"
        current = self._current
        now = "" if current is None or current.engine == self._engine.name else f", {current.engine} now"
        own = f"PoplarExecutor({kind}, {state}, emulated IPU, {self._engine.name} engine{now})"
        return f"{own}\n{module_repr(self._user_model)}"


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on outputs of a PopTorch model: the call of the training model has "
        "already run the backward pass and the weight update."
    )
