"""`PoplarExecutor`: a wrapped model, as its user sees it. What runs is kept by `Programs`."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.engines import return_freed_memory
from poptorch.errors import AnchorError, Error, explain, nearest
from poptorch.executable import Executable
from poptorch.faults import FAULTS
from poptorch.ipu import announce
from poptorch.model import handles, saving, wrapped
from poptorch.model.arguments import ArgumentBinder
from poptorch.model.buffers import updatable_buffers
from poptorch.model.checkpoints import Checkpoints
from poptorch.model.engine_use import EngineUse
from poptorch.model.graph_json import graph_json
from poptorch.model.grouping import ReplicaGroups
from poptorch.model.loading import open_file
from poptorch.model.locking import Lock, one_at_a_time
from poptorch.model.measurements import Measurements
from poptorch.model.modes import flags_in_mode, switched_warning
from poptorch.model.optimizers import GROUPS_CHANGED, Optimizers
from poptorch.model.own_options import own_options
from poptorch.model.parameter_proxy import ParameterProxy
from poptorch.model.printing import module_repr
from poptorch.model.programs import NOT_COMPILED, Programs
from poptorch.model.variants import Variant
from poptorch.options import Options
from poptorch.runtime import Session


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
        own = own_options(options, training=training)
        self._lock = Lock()
        self._training = training
        source = wrapped.WorkingCopy(model, is_own=training)
        self._user_model = source.module if user_model is None or user_model is model else user_model
        self._binder = ArgumentBinder(
            type(model).forward.__get__(model) if "forward" not in vars(model) else model.forward
        )
        self._programs = Programs(own, source, self._binder, training=training)
        announce()
        if optimizer is not None:
            self.setOptimizer(optimizer)
        if training:
            wrapped.remember(model, self)
            handles.attach(model, self)

    @property
    def _options(self) -> Options:
        """What programs of users call `options`, too."""
        return self._programs.options

    @property
    def _current(self) -> Variant | None:
        return self._programs.current

    @property
    def _session(self) -> Session | None:
        current = self._programs.current
        return None if current is None else current.session

    @property
    def _executable(self) -> Executable | None:
        current = self._programs.current
        return None if current is None else current.session.executable

    # ---- running

    @one_at_a_time
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: D × G × R micro-batches, and in training D weight updates. Compiles on first use."""
        if FAULTS.waiting is not None:
            FAULTS.strike()
        programs = self._programs
        if programs.attachment.is_offline:
            programs.attachment.check_online()
        args, kwargs = self._binder.bind(args, kwargs)
        before = programs.current
        if before is not None and not programs.attachment.is_attached:
            self.attachToDevice()
        if programs.optimizers.is_dirty:
            self.setOptimizer(programs.optimizers.optimizers)
        try:
            tensors = programs.inputs_for(args, kwargs)
            return self._run(programs, programs.compiled(), tensors)
        except BaseException as error:
            if isinstance(error, Exception):
                programs.companions.refuse(programs.current, error)
            programs.forget_since(before)
            raise

    def _run(self, programs: Programs, variant: Variant, tensors: list[torch.Tensor]) -> Any:
        warned, optimizers, report = programs.warned, programs.optimizers, programs.settings.report
        if "mode" not in warned and (switched := variant.watch.switched()):
            warned.add("mode")
            logger.warning("%s", switched_warning(switched))
        if optimizers.has_other_groups and "groups" not in warned:
            warned.add("groups")
            logger.warning(GROUPS_CHANGED)
        programs.companions.let_go(variant)
        if variant.state.has_changed(variant.watch):
            variant.bind()
        if variant.upgrade is not None:
            variant.upgrade_if_ready()
        optimizers.mark_step()
        variant.state.begin_call()
        outputs, variant.anchored, variant.trace = variant.session.run(tensors)
        variant.state.end_call()
        for output in outputs:
            output.backward = _refuse_backward  # pyright: ignore
        if report.anchored:
            variant.anchored.update(optimizers.anchored(report.anchors))
        if report.counts_cycles:
            logger.info("Total number of IPU cycles: %d", self.cycleCount())
        return variant.result(outputs)

    # ---- train and eval

    def train(self, mode: bool = True) -> PoplarExecutor:
        """Run in training mode (or not) from the next call on; the flags of the module are left alone.

        The program of each mode is compiled once, when it is first needed.
        """
        if not isinstance(mode, bool):
            raise Error(f"train() takes True or False, not {mode!r}.")
        with self._lock.held:
            self._programs.wanted = flags_in_mode(self._programs.source.module, mode)
        return self

    def eval(self) -> PoplarExecutor:
        """Run in evaluation mode from the next call on; the same as `train(False)`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model itself runs in training mode: that of the executor, or the module's until there is one."""
        with self._lock.held:
            wanted = self._programs.wanted
            return wanted[0] if wanted is not None else self._programs.source.module.training

    # ---- compiling

    @one_at_a_time
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments without running; the weights do not change."""
        if self._current is not None:
            logger.warning(
                "compile() is ignored: the model is already compiled. Call destroy() first to compile again."
            )
            return
        self._programs.compile(*self._binder.bind(args, kwargs))

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
        variant = saving.savable(self._programs.compiled())
        self.copyWeightsToHostIfNeeded()
        programs, forward = self._programs, self._binder.signature
        subject = saving.Subject(
            programs.source.module, forward, variant, programs.options, programs.optimizers, programs.scale_factor
        )
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
        self._programs.adopt(lambda: open_file(filename, trusts_code=trust_code))

    def isCompiled(self) -> bool:
        """Whether there is a compiled program."""
        return self._current is not None

    def compilationTime(self) -> timedelta:
        """How long it took to compile the model; needs `Options.showCompilationProgressBar`, which is on by default."""
        self._programs.compiled()
        if not self._programs.settings.report.show_progress:
            raise Error(
                explain(
                    "the compilation time is only kept with the progress bar, and that is switched off.",
                    options="showCompilationProgressBar(False)",
                    fix="leave showCompilationProgressBar at True; without a terminal it prints nothing",
                )
            )
        return timedelta(seconds=sum(variant.seconds for variant in self._programs.variants))

    def _debugGetPopartIR(self) -> str:
        """The compiled graph as JSON text: a dictionary whose `maingraph` lists the ops by name and type."""
        return graph_json(self._programs.compiled().session.executable)

    # ---- life cycle

    @one_at_a_time
    def destroy(self) -> None:
        """Release the program and unwrap the model; it can be wrapped again, and calling it again compiles again."""
        if self._current is not None:
            self._programs.forget()
            return_freed_memory()
        original = self._programs.source.original
        if wrapped.forget(original, self):
            handles.detach(original)

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and holds its device."""
        return self._current is not None and self._programs.attachment.is_attached

    @one_at_a_time
    def attachToDevice(self) -> None:
        """Take the device again after `detachFromDevice`; changes made on the host meanwhile are picked up."""
        current = self._programs.compiled()
        if self._programs.attachment.is_attached:
            raise Error("Device is already attached: call detachFromDevice() first.")
        self._programs.attachment.attach()
        if not current.is_outdated:
            current.refresh()

    @one_at_a_time
    def detachFromDevice(self) -> None:
        """Release the device; weights and optimiser state are on the host."""
        self._programs.compiled()
        if not self._programs.attachment.is_attached:
            raise Error("Device is not attached: it was detached before, and calling the model attaches it.")
        self._programs.attachment.detach()
        for variant in self._programs.variants:
            variant.stop_upgrading()

    # ---- weights and optimiser

    @one_at_a_time
    def copyWeightsToHost(self) -> None:
        """Bring the module up to date; one in training always is, unless processes have stages of it: then all call."""
        self._programs.compiled().state.write_back()
        self._programs.companions.fetch(self._programs.compiled())

    @one_at_a_time
    def copyWeightsToHostIfNeeded(self) -> bool:
        """Like `copyWeightsToHost`, but tells whether anything had to be copied."""
        current = self._current
        is_complete = current is None or not (current.state.is_host_stale or current.state.has_rows_only)
        if is_complete and not self._programs.companions.lacks_weights:
            return False
        self.copyWeightsToHost()
        return True

    @one_at_a_time
    def copyWeightsToDevice(self) -> None:
        """Let the program use the weights that the module has now."""
        current = self._programs.compiled()
        if not current.is_outdated:
            current.refresh()

    @one_at_a_time
    def copyNamedBuffersToDevice(self) -> None:
        """Let the program use the values that the buffers of `Options.updatableNamedBuffers` have now."""
        current = self._programs.compiled()
        names = updatable_buffers(self._programs.settings, self._programs.source.module)
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
        return self._programs.compiled().session.random.words

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._programs.compiled().session.random.words = list(state)

    def getTensorNames(self) -> list[str]:
        """The names of all tensors that `Options.anchorTensor` can ask for."""
        if self._current is None:
            raise AnchorError(NOT_COMPILED)
        return [*self._current.session.executable.tensor_names, *self._programs.optimizers.numbers()]

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """What the last call computed for the anchor of this name."""
        if self._current is None or self._current.trace is None:
            raise AnchorError(f"there is nothing for the anchor {short_name!r} yet: call the model first.")
        if short_name in self._current.anchored:
            return self._current.anchored[short_name]
        known = sorted(self._programs.settings.report.anchors)
        raise AnchorError(f"{short_name!r} is no anchor of this model{nearest(short_name, known)}")

    def compilationReport(self) -> str:
        """What was compiled and why: one line per program, more than one only with `Options.allowShapeChanges`."""
        return self._programs.variants.report()

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
        self._programs.use_optimizers(optimizers)

    # ---- looking like the model

    @property
    def model(self) -> nn.Module:
        """The PyTorch module."""
        return self._user_model

    @property
    def per_replica_params(self) -> dict[str, ReplicaGroups | tuple[Any, ...]]:
        """How replicas are grouped for each parameter of which groups have weights of their own."""
        return self._programs.replica_groups

    @per_replica_params.setter
    def per_replica_params(self, groups: dict[str, ReplicaGroups | tuple[Any, ...]]) -> None:
        self._programs.replica_groups = groups

    @property
    def options(self) -> Options:
        """The options of this executor, frozen, with the output mode resolved."""
        return self._programs.options

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
        self._programs.replica_groups[name] = groups

    def __repr__(self) -> str:
        kind = "training" if self._training else "inference"
        state = "compiled" if self.isCompiled() else "not compiled"
        current, engine = self._current, self._programs.engine.name
        now = "" if current is None or current.engine == engine else f", {current.engine} now"
        own = f"PoplarExecutor({kind}, {state}, emulated IPU, {engine} engine{now})"
        return f"{own}\n{module_repr(self._user_model)}"


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on outputs of a PopTorch model: the call of the training model has "
        "already run the backward pass and the weight update."
    )
