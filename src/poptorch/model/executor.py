"""`PoplarExecutor`: a wrapped model. It joins capture, compiler and runtime, and keeps track of who owns what."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from tqdm import tqdm

from poptorch._logging import limit_repeats, logger
from poptorch.capture import Call, Captured
from poptorch.compiler import compile_graph, dumping, show_captured
from poptorch.errors import AnchorError, ArgumentError, Error, WrappedError, explain, nearest
from poptorch.executable import Executable
from poptorch.faults import FAULTS
from poptorch.ir.structure import rebuild
from poptorch.model import handles
from poptorch.model.arguments import ArgumentBinder, CallSpec, prepare
from poptorch.model.attachment import Attachment
from poptorch.model.buffers import check_broadcast, updatable_buffers
from poptorch.model.clock import Clock, clocks_of
from poptorch.model.graph_json import graph_json
from poptorch.model.grouping import ReplicaGroups, one_group_each, plan_groupings
from poptorch.model.hooks import compile_hooks
from poptorch.model.measurements import Measurements
from poptorch.model.optimizers import Optimizers, OptimizerSet, is_number, settings_for
from poptorch.model.parameter_proxy import ParameterProxy
from poptorch.model.printing import module_repr
from poptorch.model.state import OwnedState, Snapshot
from poptorch.model.synthetic import SyntheticInputs
from poptorch.model.variants import Variant, Variants
from poptorch.optim.plan import plan_optimizers
from poptorch.options import Options, resolve, validate
from poptorch.runtime import CheckedEngine, EagerEngine, Session, choose_engine, return_freed_memory

_NOT_COMPILED = (
    "Model has not been compiled or has been destroyed. Call it, or call compile() with an example batch, first."
)
_wrapped = WeakIdKeyDictionary()  # module → weak reference to the executor that trains it


class PoplarExecutor(Measurements):
    """A model that runs as a compiled program; made by `trainingModel` and `inferenceModel`, called like the model."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        training: bool,
        optimizer: Optimizers | None = None,
    ) -> None:
        self._training = training
        self._traced = copy.copy(model)
        self._user_model = model if training else self._traced
        self._options = options
        self._settings = resolve(options, training=training)
        requested = options("engine") if options.exists("engine") else None
        self._engine = CheckedEngine() if self._settings.floating_point_checks else choose_engine(requested)
        self._binder = ArgumentBinder(
            type(model).forward.__get__(model) if "forward" not in vars(model) else model.forward
        )
        self._optimizers = OptimizerSet()
        self.per_replica_params: dict[str, ReplicaGroups] = {}
        self._warned: set[str] = set()
        self._synthetic = SyntheticInputs(self._settings.synthetic_data, self._settings.random_seed)
        self._counts_cycles = bool(options._Popart.options["instrumentWithHardwareCycleCounter"])
        self._attachment = Attachment(options, self._settings.batching.replicas)
        self._forget()
        if optimizer is not None:
            self.setOptimizer(optimizer)
        if training:
            _wrapped[model] = weakref.ref(self)
            handles.attach(model, self)

    def _forget(self) -> None:
        """Back to the state before compilation."""
        self._session: Session | None = None
        self._call: CallSpec | None = None
        self._state: OwnedState | Snapshot | None = None
        self._clocks: list[Clock] = []
        self._variants = Variants()
        self._attachment.detach()
        self._host_is_stale = False  # whether an inference program has buffers that the module does not know of

    # ---- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: D × G × R micro-batches, and in training D weight updates. Compiles on first use."""
        if FAULTS.waiting is not None:
            FAULTS.strike()
        if self._attachment.is_offline:
            self._attachment.check_online()
        args, kwargs = self._binder.bind(args, kwargs)
        if self._session is None:
            self._compile(args, kwargs)
        elif not self._attachment.is_attached:
            self.attachToDevice()
        assert self._call is not None and self._session is not None
        tensors = self._inputs(self._tensors(args, kwargs))
        if self._optimizers.is_dirty:
            self.setOptimizer(self._optimizers.optimizers)
        self._synchronise(self._session)
        outputs = self._session.run(tensors)
        for output in outputs:
            output.backward = _refuse_backward  # pyright: ignore
        if self._settings.anchors:
            self._session.anchored.update(self._optimizers.anchored(self._settings.anchors))
        if self._training:
            self._optimizers.mark_step()
            for clock in self._clocks:
                clock.time += 1
        elif self._session.executable.step.written_state:
            self._host_is_stale = True
        if self._counts_cycles:
            logger.info("Total number of IPU cycles: %d", self.cycleCount())
        return rebuild(self._session.executable.result, outputs)

    def _inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the program is fed: the tensors of the caller, or synthetic ones of the same shapes."""
        if self._settings.synthetic_data:
            return self._synthetic.like(tensors)
        return prepare(tensors, self._warned)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call; if it is not like the compiled one, find or compile another program if allowed."""
        assert self._call is not None
        try:
            return self._call.tensors(args, kwargs)
        except ArgumentError as mismatch:
            if not self._options.allow_shape_changes:
                raise
            reason = mismatch.message.splitlines()[0]
        found = self._variants.find(args, kwargs)
        if found is None:
            call = CallSpec.of(self._binder, args, kwargs)
            logger.info("compiling again for %s: %s", call, reason)
            self._build(call, args, kwargs, reason)
            return call.tensors(args, kwargs)
        variant, tensors = found
        self._call, self._session, self._state = variant.call, variant.session, variant.state
        return tensors

    def _synchronise(self, session: Session) -> None:
        """Make sure the program sees the state as its owners have it."""
        state = self._state
        if isinstance(state, OwnedState):
            if not state.is_unchanged():
                session.bind(state.tensors())
        elif isinstance(state, Snapshot):
            now = [clock.time for clock in self._clocks]
            if now != state.seen:
                logger.debug("Implicit copyWeightsToDevice()")
                self._refresh(state)
            elif "host" not in self._warned and not state.is_current():
                self._warned.add("host")
                logger.warning(
                    "the weights of an inference model were changed on the host after it was compiled; it goes on with "
                    "the old ones. Call copyWeightsToDevice() to use the new ones."
                )

    def _refresh(self, state: Snapshot) -> None:
        assert self._session is not None
        logger.debug("Writing weights from host to IPU memory")
        state.seen = []  # if this fails, the next call tries again
        state.refresh()
        self._session.bind(state.tensors())
        state.seen = [clock.time for clock in self._clocks]
        self._host_is_stale = False

    # ---- compiling

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments without running; the weights do not change."""
        if self._session is not None:
            logger.warning(
                "compile() is ignored: the model is already compiled. Call destroy() first to compile again."
            )
            return
        self._compile(*self._binder.bind(args, kwargs))

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        validate(self._options.toDict())
        limit_repeats(self._options.max_repeat_logs)
        updatable_buffers(self._options, self._traced)
        self._check_processes()
        if self._counts_cycles and self._attachment.uses_model:
            raise Error("Cycle count logging is only supported on actual IPU hardware, not on the IPU model.")
        call = CallSpec.of(self._binder, args, kwargs)
        self._attachment.before_compilation()
        try:
            self._build(call, args, kwargs, "the first call")
            self._attachment.after_compilation()
        except BaseException:
            self._forget()
            raise

    def _check_processes(self) -> None:
        processes = self._options.Distributed
        if self._training and processes.numProcesses > 1:
            raise Error(
                explain(
                    "training in several processes is not supported yet: each would train a model of its own.",
                    options=f"Distributed.configureProcessId({processes.processId}, {processes.numProcesses})",
                    fix="train in one process, with Options.replicationFactor for more replicas; inference models and "
                    "DataLoader work in several processes",
                )
            )

    def _build(self, call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        """Capture, compile and load."""
        start = time.perf_counter()
        label = "training" if self._training else "inference"
        with _progress(self._settings.show_progress) as phase:
            phase("Capturing the model")
            parameters = dict(self._traced.named_parameters())
            groupings = plan_groupings(parameters, self.per_replica_params, self._settings)
            with one_group_each(parameters, groupings), compile_hooks():
                captured = self._capture(call, args, kwargs)
            show_captured(captured.graph)
            phase("Optimising the graph")
            anchors = {s: anchor for s, anchor in self._settings.anchors.items() if not is_number(anchor.long_name)}
            settings = replace(self._settings, anchors=anchors)
            executable = compile_graph(captured.graph, captured.result, settings, dumping(label))
            executable = replace(executable, groupings=groupings)
            kernels = {}
            strides: dict[str, tuple[int, ...]] = {}
            for program in executable.programs:
                phase(f"Compiling the {program.name} program")
                is_run_once = program is executable.prepare and not self._settings.floating_point_checks
                engine = EagerEngine() if is_run_once else self._engine
                kernels[program.name] = engine.compile(program, strides)
                strides.update(kernels[program.name].strides)
            check_broadcast(self._options, self._traced, executable)
            phase("Loading")
            state = self._own(captured, executable, strides)
            session = Session(executable, kernels, state.tensors())
        self._clocks = clocks_of(list(parameters.values()))
        if isinstance(state, Snapshot):
            state.seen = [clock.time for clock in self._clocks]
        self._call, self._session, self._state = call, session, state
        self._variants.add(Variant(call, session, state, reason, time.perf_counter() - start))
        self._connect_optimizers()
        if not self._attachment.is_offline:
            self._optimizers.anchored(self._settings.anchors)  # raises if there is no such number
        logger.info(
            "compiled a %s model for %s emulated IPU(s) on the %s engine",
            label,
            self._settings.batching.replicas,
            self._engine.name,
        )

    def _capture(self, call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        from poptorch.capture.record import capture_inference, capture_training  # takes a second, so only when needed

        plan = self._settings.batching
        tensors = self._inputs(call.tensors(args, kwargs))
        examples: list[torch.Tensor] = []
        for name, tensor in zip(call.tensor_names, tensors, strict=True):
            rows = plan.rows_per_micro_batch(name, tuple(tensor.shape))
            examples.append(tensor.narrow(0, 0, rows) if tensor.dim() else tensor)
        registered = dict(self._traced.named_parameters()) | dict(self._traced.named_buffers())
        names = tuple(f"input:{name}" if name in registered else name for name in call.tensor_names)
        example = Call(call.args, call.kwargs, names, tuple(examples))
        if self._training:
            return capture_training(self._traced, example, self._optimizers.plans, self._settings)
        return capture_inference(self._traced, example, self._settings)

    def _own(
        self, captured: Captured, executable: Executable, strides: dict[str, tuple[int, ...]]
    ) -> OwnedState | Snapshot:
        if self._training:
            groups, specs, groupings = captured.groups, executable.state, executable.groupings
            optimizers, plans = self._optimizers.optimizers, self._optimizers.plans
            return OwnedState(self._traced, optimizers, plans, groups, specs, strides, groupings)
        return Snapshot(self._traced, executable.state, strides, executable.groupings)

    def isCompiled(self) -> bool:
        """Whether there is a compiled program."""
        return self._session is not None

    @property
    def _executable(self) -> Executable | None:
        return None if self._session is None else self._session.executable

    def compilationTime(self) -> timedelta:
        """How long it took to compile the model; needs `Options.showCompilationProgressBar`, which is on by default."""
        if self._session is None:
            raise Error(_NOT_COMPILED)
        if not self._settings.show_progress:
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
        if self._executable is None:
            raise Error(_NOT_COMPILED)
        return graph_json(self._executable)

    def _compiled_state(self) -> OwnedState | Snapshot:
        if self._state is None:
            raise Error(_NOT_COMPILED)
        return self._state

    # ---- life cycle

    def destroy(self) -> None:
        """Release the program and unwrap the model; it can be wrapped again, and calling it again compiles again."""
        if self._session is not None:
            self._forget()
            return_freed_memory()
        reference = _wrapped.get(self._user_model)
        if reference is not None and reference() is self:
            del _wrapped[self._user_model]
            handles.detach(self._user_model)

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and holds its device."""
        return self._session is not None and self._attachment.is_attached

    def attachToDevice(self) -> None:
        """Take the device again after `detachFromDevice`; changes made on the host meanwhile are picked up."""
        state = self._compiled_state()
        if self._attachment.is_attached:
            raise Error("Device is already attached: call detachFromDevice() first.")
        self._attachment.attach()
        if isinstance(state, Snapshot):
            self._refresh(state)

    def detachFromDevice(self) -> None:
        """Release the device; weights and optimiser state are on the host."""
        self._compiled_state()
        if not self._attachment.is_attached:
            raise Error("Device is not attached: it was detached before, and calling the model attaches it.")
        self._attachment.detach()

    # ---- weights and optimiser

    def copyWeightsToHost(self) -> None:
        """Bring parameters and buffers of the module up to date; a trained module always is."""
        state = self._compiled_state()
        if isinstance(state, Snapshot):
            assert self._session is not None
            logger.debug("Writing weights from IPU to host")
            state.write_back(self._session.executable.step.written_state)
            self._host_is_stale = False

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Like `copyWeightsToHost`, but tells whether anything had to be copied."""
        if not self._host_is_stale:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Let the program use the weights that the module has now."""
        state = self._compiled_state()
        if isinstance(state, Snapshot):
            self._refresh(state)
        else:
            assert self._session is not None
            self._session.bind(state.tensors())

    def copyNamedBuffersToDevice(self) -> None:
        """Let the program use the values that the buffers of `Options.updatableNamedBuffers` have now."""
        state = self._compiled_state()
        names = updatable_buffers(self._options, self._traced)
        if names is None:
            raise Error(
                explain(
                    "copyNamedBuffersToDevice() does not know which buffers to copy.",
                    fix='name them: Options.updatableNamedBuffers(["scale"])',
                )
            )
        if isinstance(state, Snapshot):
            assert self._session is not None
            state.refresh(names)
            self._session.bind(state.tensors())

    @property
    def rng_state(self) -> list[int] | None:
        """The random numbers of the device as numbers that can be set again; the seed alone before the first call."""
        self._compiled_state()
        assert self._session is not None
        return self._session.random.words

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._compiled_state()
        assert self._session is not None
        self._session.random.words = list(state)

    def getTensorNames(self) -> list[str]:
        """The names of all tensors that `Options.anchorTensor` can ask for."""
        if self._session is None:
            raise AnchorError(_NOT_COMPILED)
        return [*self._session.executable.tensor_names, *self._optimizers.numbers()]

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """What the last call computed for the anchor of this name."""
        if self._session is None or not self._session.times.finished:
            raise AnchorError(f"there is nothing for the anchor {short_name!r} yet: call the model first.")
        if short_name in self._session.anchored:
            return self._session.anchored[short_name]
        known = sorted(self._options.anchored_tensors)
        raise AnchorError(f"{short_name!r} is no anchor of this model{nearest(short_name, known)}")

    def compilationReport(self) -> str:
        """What was compiled and why: one line per program, more than one only with `Options.allowShapeChanges`."""
        return self._variants.report()

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load weights into the model and use them from the next call on."""
        result = self._user_model.load_state_dict(state_dict, strict=strict)
        if self._session is not None:
            self.copyWeightsToDevice()
        return result

    def setOptimizer(self, optimizer: Optimizers) -> None:
        """Use the settings that the optimiser has now, for example after an LR scheduler; nothing compiles again."""
        if not self._training:
            raise AttributeError("an inference model has no optimiser: setOptimizer belongs to poptorch.trainingModel.")
        optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        automatic = self._settings.automatic_loss_scaling
        if self._session is not None:
            self._optimizers.check_order(optimizers)
        plans = plan_optimizers(optimizers, self._optimizers.plans, automatic_loss_scaling=automatic)
        self._settings = settings_for(plans, self._settings, self._options, is_compiled=self._session is not None)
        for variant in self._variants:
            if isinstance(variant.state, OwnedState):
                variant.state.set_hypers(plans)
                variant.state.adopt(optimizers)
        self._optimizers.optimizers, self._optimizers.plans = optimizers, plans
        quietly = bool(getattr(self._options, "relax_optimizer_attributes_checks", False))
        self._optimizers.report(self._traced, quietly=quietly)
        self._connect_optimizers()

    def _connect_optimizers(self) -> None:
        """Let the optimisers show what the program knows; one that never gets a device has nothing to show."""
        if isinstance(self._state, OwnedState) and not self._attachment.is_offline:
            self._optimizers.connect(self._state, self._settings)

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
        if self._session is not None:
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
        own = f"PoplarExecutor({kind}, {state}, emulated IPU, {self._engine.name} engine)"
        return f"{own}\n{module_repr(self._user_model)}"


def is_training_wrapped(model: nn.Module) -> bool:
    """Whether a live executor trains this module."""
    reference = _wrapped.get(model)
    return reference is not None and reference() is not None


def check_unwrapped(model: nn.Module) -> None:
    """Raise if the module is wrapped for training already."""
    if is_training_wrapped(model):
        raise WrappedError(
            explain(
                f"Model has already been wrapped: another training executor trains this {type(model).__name__}.",
                fix="call destroy() on that executor first",
            )
        )


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on outputs of a PopTorch model: the call of the training model has "
        "already run the backward pass and the weight update."
    )


@contextmanager
def _progress(show: bool) -> Iterator[Any]:
    """A bar that names the phases of a compilation; silent if standard error is not a terminal."""
    with tqdm(
        desc="Graph compilation",
        total=None,
        disable=None if show else True,
        leave=False,
        bar_format="{desc} [{elapsed}]",
    ) as bar:

        def phase(name: str) -> None:
            logger.debug("%s", name)
            bar.set_description_str(f"Graph compilation: {name}")
            bar.refresh()

        yield phase
