"""Trace one step of a module: forward, and for training also the gradients of its loss.

A recorder writes down what PyTorch's own autograd does, on tensors without values if possible. The trace is repeated
with the values of the first micro-batch for the reasons in `_VALUES_NEEDED` alone; what Python reads then becomes a
guard of the graph. Any other exception ends it at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from poptorch._logging import logger, warn_once, without_remarks
from poptorch.capture.autocast import Autocast
from poptorch.capture.call import Call
from poptorch.capture.context import capturing
from poptorch.capture.device import on_program_device
from poptorch.capture.intercept import Intercept
from poptorch.capture.losses import LossMarks, choose_loss
from poptorch.capture.mixed_types import unify
from poptorch.capture.placer import Placer
from poptorch.capture.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    disable_current_modes,
    from_fun,
    fx_traceback,
    to_fun,
)
from poptorch.capture.proxies import node_of, origin_of
from poptorch.capture.recorder import Recorder, ValuesNeeded
from poptorch.capture.residents import Residents
from poptorch.capture.source import current_user_line, raised_by_tracer, raised_by_user, raising_user_line
from poptorch.capture.stand_ins import named_state, places, read_back, run_with_stand_ins, with_own_state
from poptorch.capture.statistics import widened
from poptorch.capture.views import at_start, overlap
from poptorch.capture.watch import Watch
from poptorch.compiling import as_if_compiling
from poptorch.errors import CaptureError, CompileError, Error, explain
from poptorch.ir import (
    Direction,
    GraphBuilder,
    Guard,
    InputSpec,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    fake_mode,
    give_name,
)
from poptorch.ir.ops import depends_on_inputs, memory_owner
from poptorch.options import Settings
from poptorch.structure import Constant, Leaf, Structure, constants, flatten, hidden_tensors, map_leaves, rebuild

NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}


@dataclass(frozen=True)
class Traced:
    """A traced step: its graph, with a GRADIENT output per trained parameter, and the structure of its result."""

    graph: StepGraph
    result: Structure
    loss_type: torch.dtype


def trace_step(module: nn.Module, call: Call, settings: Settings, scales: tuple[InputSpec, ...] = ()) -> Traced:
    """Trace forward, and for training also backward; the module is left exactly as it was.

    `scales` are inputs of the graph that the gradient of the loss is multiplied with where it starts.
    """
    try:
        return _attempt(_Trace(module, call, settings, scales, has_values=False))
    except _VALUES_NEEDED as reason:
        logger.debug("tracing again with the values of the first batch: %s %s", type(reason).__name__, reason)
    try:
        return _attempt(_Trace(module, call, settings, scales, has_values=True))
    except _VALUES_NEEDED as error:
        raise _not_captured(error.__cause__ or error) from error


_VALUES_NEEDED = (
    ValuesNeeded,  # Python asks for a value, or for a size that depends on values
    DataDependentOutputException,  # the same, asked by one of PyTorch's own functions
    DynamicOutputShapeException,
    UnsupportedOperatorException,  # an op that tells the shape of its result only by computing it
    UnsupportedFakeTensorException,
)


def _reason_inside(error: BaseException | None) -> BaseException | None:
    """The reason to trace again that a library has wrapped into an exception of its own."""
    while error is not None and not isinstance(error, _VALUES_NEEDED):
        error = error.__cause__ or error.__context__
    return error


def _attempt(trace: _Trace) -> Traced:
    """Run a trace; what fails inside PyTorch is explained, what the user's own code raises is left as it is."""
    try:
        return trace.run()
    except (Error, *_VALUES_NEEDED):
        raise
    except Exception as error:
        if (needed := _reason_inside(error)) is not None:
            raise needed from None
        is_torchs = isinstance(error, RuntimeError) or raised_by_tracer(error.__traceback__)
        if raised_by_user(error.__traceback__) or not is_torchs:
            raise
        raise _not_captured(error) from error


class _Trace:
    """One attempt at a trace, with fake tensors or with real ones."""

    def __init__(
        self, module: nn.Module, call: Call, settings: Settings, scales: tuple[InputSpec, ...], *, has_values: bool
    ) -> None:
        self.module, self.call, self.scales, self.training = module, call, scales, settings.is_training
        self.parameters, self.buffers = named_state(module)
        self.residents = Residents()
        self.placer = Placer(settings.placement.strategy)
        self.watch = Watch(self.residents, self.placer, has_values=has_values)
        autocast = Autocast(settings.precision.autocasting, self.watch.running)
        self.marks = LossMarks()
        unified = partial(unify, casting=settings.precision.half_float_casting)
        self.intercept = Intercept((on_program_device, self.residents.adapt, autocast.cast, unified), self.marks)
        self.has_values, self.widens = has_values, settings.precision.widens_statistics
        self.outputs: list[OutputSpec] = []
        self.result: Structure = Constant(None)
        self.loss_type = torch.float32

    def run(self) -> Traced:
        buffers = [widened(self.module, *pair) if self.widens else pair[1] for pair in self.buffers.items()]
        given = (*self.parameters.values(), *buffers, *self.call.tensors)
        tensors = [t.detach().resolve_conj().resolve_neg() for t in given]  # as they lie in memory when the step runs
        tensors += [torch.ones(spec.shape, dtype=spec.dtype) for spec in self.scales]
        if self.has_values:
            self._refuse_meta()
        with _quiet_tracing(self.training) as fake:
            inputs = [at_start(t) if self.has_values else _described(at_start(t), fake) for t in tensors]
            with ExitStack() as stack:
                if not self.has_values:
                    stack.enter_context(fake)
                stack.callback(self.watch.rewind_generators)
                recorder = Recorder(fake)
                recorder.record(self._step, inputs)
        self._refuse_shared_memory()
        self.watch.report()
        guards = tuple(guard for guard, _ in self.watch.guards)
        graph = _finish(recorder, self._specs(tensors), self.outputs, guards)
        return Traced(graph, self.result, self.loss_type)

    def _specs(self, tensors: list[torch.Tensor]) -> list[InputSpec]:
        """What the inputs of the trace are: parameters, buffers, the user's tensors, scales."""
        remaining = iter(tensors)
        specs = [InputSpec.of(name, Role.PARAMETER, next(remaining)) for name in self.parameters]
        specs += [InputSpec.of(name, Role.BUFFER, next(remaining)) for name in self.buffers]
        for name, argument in zip(self.call.names, self.call.arguments, strict=True):
            specs.append(InputSpec.of(name, Role.USER_INPUT, next(remaining), key=argument))
        return [*specs, *self.scales]

    def _step(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """The function that is traced. Its inputs are the parameters, the buffers and the user's tensors."""
        with FunctionalTensorMode(), self.watch:
            given = [to_fun(tensor) for tensor in flat]
            scales = [given.pop() for _ in self.scales]
            n_parameters, n_state = len(self.parameters), len(self.parameters) + len(self.buffers)
            leaves = [self._leaf(p, t) for p, t in zip(self.parameters.values(), given[:n_parameters], strict=True)]
            named = dict(zip((*self.parameters, *self.buffers), (*leaves, *given[n_parameters:n_state]), strict=True))
            watched = {**named, **dict(zip(self.call.names, given[n_state:], strict=True))}
            passed = {name: _narrow_float(tensor) for name, tensor in watched.items()}
            before = {name: origin_of(tensor) for name, tensor in passed.items()}
            first_names = {id(t): name for name, t in (*self.parameters.items(), *self.buffers.items())}
            replacements = {id(tensor): passed[first_names[id(tensor)]] for _, tensor in places(self.module)}
            for name, tensor in (*self.parameters.items(), *self.buffers.items()):
                self.residents.add(name, tensor, passed[name])

            originals = list(places(self.module))

            def changes() -> dict[str, torch.Tensor]:
                now = {**self._registered(passed), **{name: passed[name] for name in self.call.names}}
                changed = {name: tensor for name, tensor in now.items() if origin_of(tensor) is not before[name]}
                return {name: _detached(tensor).to(watched[name].dtype) for name, tensor in changed.items()}

            def run() -> list[torch.Tensor]:
                own_state = partial(with_own_state, originals)
                seen = (self.marks, self.placer, self.intercept)
                with capturing(*seen, training=self.training, own_state=own_state), as_if_compiling():
                    outputs = self._user_outputs(self._forward([passed[name] for name in self.call.names]))
                    leaves_by_name = dict(zip(self.parameters, leaves, strict=True))
                    gradients = self._gradients(leaves_by_name, [*outputs, *changes().values()], scales)
                    changed = changes()  # checkpointing runs parts of forward again in the backward pass
                return self._collect(outputs, changed, gradients)

            return run_with_stand_ins(self.module, replacements, run)

    def _refuse_meta(self) -> None:
        """A trace with values needs those of all parameters and buffers."""
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            if tensor.is_meta:
                raise CompileError(
                    explain(
                        f"forward needs values while it is compiled, but {name} is on the meta device and has none.",
                        fix="make forward independent of values (torch.where, masks), or build the model on the CPU",
                    )
                )

    def _refuse_shared_memory(self) -> None:
        """A tensor that the step writes must not share memory with another: the graph knows each by itself."""
        written = {spec.name for spec in self.outputs if spec.role in (OutputRole.NEW_VALUE, OutputRole.GRADIENT)}
        state = [*self.parameters.items(), *self.buffers.items()]
        for name, tensor in state:
            partners = [other for other, t in state if name in written and t is not tensor and overlap(tensor, t)]
            if partners:
                raise CompileError(
                    explain(
                        f"{name} shares memory with {', '.join(partners)}, and the step changes it.",
                        fix="register one of them only, and compute the other from it in forward",
                    )
                )

    def _leaf(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """A traced stand-in for a parameter: `isinstance(leaf, nn.Parameter)` holds, and the user's hooks are on it."""
        leaf = tensor.detach()
        if not self.training or not parameter.requires_grad:
            leaf._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
            return leaf
        leaf.requires_grad_(True)
        leaf._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
        for hook in (parameter._backward_hooks or {}).values():
            leaf.register_hook(hook)
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            leaf.register_post_accumulate_grad_hook(hook)
        return leaf

    def _forward(self, user_tensors: list[torch.Tensor]) -> Any:
        with self.intercept, self.watch.following(self.module):
            return self.module(*rebuild(self.call.args, user_tensors), **rebuild(self.call.kwargs, user_tensors))

    def _registered(self, passed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is registered on the module now under the names of its parameters and buffers."""
        stand_ins = {name: passed[name] for name in (*self.parameters, *self.buffers)}
        return read_back(self.module, stand_ins, frozenset(self.buffers))

    def _user_outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors that forward returns, in device types; one that is returned twice appears once."""
        structure, tensors = flatten(result)
        outputs: list[torch.Tensor] = []
        positions: dict[fx.Node, int] = {}

        def place(index: int) -> Structure:
            tensor = self.watch.current(tensors[index])
            if not isinstance(tensor, FunctionalTensor):
                return Constant(_host_output(tensor))
            value = _narrow_result(tensor.detach())
            node = origin_of(value)
            assert node is not None
            if node not in positions:
                positions[node] = len(outputs)
                outputs.append(value)
            return Leaf(positions[node])

        self.result = map_leaves(structure, place)
        for value in constants(structure):
            if isinstance(value, Iterator):
                raise _iterator_result(value)
            if any(isinstance(tensor, FunctionalTensor) for tensor in hidden_tensors(value)):
                raise _unknown_result(value)
        return outputs

    def _gradients(
        self, leaves: dict[str, torch.Tensor], results: list[torch.Tensor], scales: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Differentiate the loss; give the gradient of each parameter that it reaches."""
        if not self.training:
            return {}
        nodes = [node for node in map(origin_of, results) if node is not None]
        loss = choose_loss(self.marks.marks, nodes)
        if not loss.requires_grad:
            return {}
        self.watch.direction = Direction.BACKWARD
        self.loss_type = loss.dtype
        start = torch.ones_like(loss)
        if scales:
            scale = torch.stack(scales).prod()
            node = node_of(scale)
            assert node is not None
            give_name(node, "finalLossScale")
            start = start * scale.to(loss.dtype)
        gradients = self._differentiate(loss, start, leaves)
        sparse = [name for name, grad in gradients.items() if grad is not None and grad.layout is not torch.strided]
        if sparse:
            raise CompileError(
                explain(
                    f"the gradient of {', '.join(sparse)} is sparse, and a compiled step works on dense gradients.",
                    fix="create the embedding without sparse=True",
                )
            )
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _differentiate(
        self, loss: torch.Tensor, start: torch.Tensor, leaves: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        """The gradient of each leaf.

        A function that takes tensors past torch's overrides, such as that of an `autograd.Function`, may have been
        given a parameter itself; what arrives there belongs to the leaf as well.
        """
        originals = {name: self.parameters[name] for name, leaf in leaves.items() if leaf.requires_grad}
        before = {name: parameter.grad for name, parameter in originals.items()}
        for parameter in originals.values():
            parameter.grad = None
        try:
            torch.autograd.backward(loss, start)
            found = {name: (leaves[name].grad, parameter.grad) for name, parameter in originals.items()}
        finally:
            for name, parameter in originals.items():
                parameter.grad = before[name]
        return {name: a if b is None else b if a is None else a + b for name, (a, b) in found.items()}

    def _collect(
        self, outputs: list[torch.Tensor], changed: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Everything the graph returns, and the specs that say what it is."""
        written = {origin_of(value) for value in changed.values()}
        results: list[torch.Tensor] = []
        for index, value in enumerate(outputs):
            node = node_of(value)
            assert node is not None
            owner = memory_owner(node)
            if owner.op in ("placeholder", "get_attr") or owner in written or node in written:
                value = value.clone()  # a result must not change when the state it shows does
            self.outputs.append(OutputSpec(f"output{index}", OutputRole.USER_OUTPUT, batched=depends_on_inputs(node)))
            results.append(value)
        if self.watch.guards:
            self.outputs.append(OutputSpec("guards", OutputRole.GUARD))
            results.append(torch.stack([check.detach().reshape(()) for _, check in self.watch.guards]))
        for name, value in changed.items():
            self.outputs.append(OutputSpec(name, OutputRole.NEW_VALUE))
            results.append(value)
        for name, gradient in gradients.items():
            self.outputs.append(OutputSpec(name, OutputRole.GRADIENT))
            results.append(gradient.detach().resolve_conj().resolve_neg())  # views of either kind have no memory
        return [from_fun(value) for value in results]  # pyright: ignore[reportReturnType]


def _described(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    """A tensor without values in place of one of the CPU, or of one that will be there."""
    if not tensor.is_meta:
        return fake.from_tensor(tensor, static_shapes=True)
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A traced tensor without history; a plain tensor enters the graph as a constant."""
    return tensor.detach() if isinstance(tensor, FunctionalTensor) else torch.clone(tensor)


@contextmanager
def _quiet_tracing(training: bool) -> Iterator[FakeTensorMode]:
    """The surroundings of a trace: nothing the user set outside changes it, and nothing it does stays behind."""
    fake = fake_mode()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.set_grad_enabled(training),
        fx_traceback.preserve_node_meta(),
        without_remarks("torch._subclasses.fake_tensor"),  # about errors that the user gets to see anyway
    ):
        seed = torch.initial_seed()
        try:
            yield fake
        finally:
            torch.clear_autocast_cache()
        if torch.initial_seed() != seed:
            warn_once(_SEEDED)


_SEEDED = (
    "forward calls torch.manual_seed, which has no effect on a compiled program: its random numbers come from "
    "generators of the device. Seed those with Options.randomSeed, or hand a torch.Generator to operations that draw."
)


def _narrow_result(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in NARROWED:
        return tensor
    narrow = NARROWED[tensor.dtype]
    warn_once(f"a model returns {tensor.dtype}, which IPUs do not have: the result is {narrow} instead.")
    return tensor.to(narrow)


def _narrow_float(tensor: torch.Tensor) -> torch.Tensor:
    """float64 and bfloat16 are float32 on the device; 64-bit integers are only narrowed in results."""
    if tensor.dtype not in (torch.float64, torch.bfloat16):
        return tensor
    narrowed = tensor.float()
    if getattr(tensor, "_is_param", False):
        narrowed._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
    return narrowed


def _unknown_result(value: object) -> CompileError:
    kind = type(value).__name__
    return CompileError(
        explain(
            f"forward returns a {kind} that holds tensors, and this type is not known.",
            fix=f"return its tensors themselves, or teach poptorch the type: "
            f"poptorch.registerCustomArgParser({kind}, ...)",
        )
    )


def _iterator_result(value: Iterator[object]) -> CompileError:
    """An iterator that was made in the trace would be the same one in every call, and used up after the first."""
    return CompileError(
        explain(
            f"forward returns a {type(value).__name__}, which can be gone through only once.",
            fix="return a list or a tuple of what it gives",
        )
    )


def _host_output(tensor: torch.Tensor) -> torch.Tensor:
    warnings.warn(
        "Output expected to be on the IPU but is on cpu: forward returns a tensor of shape "
        f"{list(tensor.shape)} that it did not compute; it is returned with the value it has now.",
        stacklevel=2,
    )
    with disable_current_modes():
        return tensor.detach().clone()


def _finish(
    recorder: Recorder, specs: list[InputSpec], outputs: list[OutputSpec], guards: tuple[Guard, ...]
) -> StepGraph:
    """Make a StepGraph of a trace: constants become inputs, dead ops and unused state go."""
    source = recorder.graph
    source.eliminate_dead_code()
    results: list[fx.Node] = list(source.output_node().args[0])  # pyright: ignore
    placeholders = [node for node in source.nodes if node.op == "placeholder"]
    written = {spec.name for spec in outputs if spec.role in (OutputRole.NEW_VALUE, OutputRole.GRADIENT)}
    builder = GraphBuilder()
    for spec, node in zip(specs, placeholders, strict=True):
        if node.users or spec.role is Role.USER_INPUT or spec.name in written:
            builder.input(spec, node)
    values = recorder.add_constants(builder)
    builder.copy(source.nodes)
    for spec, node in zip(outputs, results, strict=True):
        builder.output(spec, builder.copies[node])
    return builder.build("step", guards=guards, constants=values, graphs=recorder.graphs)


def _not_captured(error: BaseException) -> CaptureError:
    line = raising_user_line(error.__traceback__) or current_user_line()
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return CaptureError(
        explain(
            f"forward failed while it was compiled: {reason}",
            where=str(line),
            fix="if the model runs in plain PyTorch, replace this by other tensor operations or move it out of forward",
        )
    )
