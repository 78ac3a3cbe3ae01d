"""Trace one step of a module: forward, and for training also the gradients of its loss.

PyTorch's own tracer records what PyTorch's own autograd does, on fake tensors if possible. When Python reads a value
on the way, the trace is repeated with the real first micro-batch, and what was read becomes a guard of the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback as fx_traceback
from torch.utils._python_dispatch import _disable_current_modes

from poptorch._logging import logger, warn_once
from poptorch.capture.autocast import Autocast
from poptorch.capture.call import Call
from poptorch.capture.context import capturing
from poptorch.capture.losses import LossMarks, choose_loss
from poptorch.capture.proxies import node_of
from poptorch.capture.recorder import Recorder
from poptorch.capture.source import current_user_line, raised_by_user, raising_user_line
from poptorch.capture.stand_ins import named_state, places, read_back, stand_ins
from poptorch.capture.watch import ValuesNeeded, Watch
from poptorch.errors import CaptureError, CompileError, Error, explain
from poptorch.ir import Guard, InputSpec, OutputRole, OutputSpec, Phase, Role, Signature, StepGraph, give_name
from poptorch.ir.ops import depends_on_inputs, is_random, memory_owner
from poptorch.ir.structure import Constant, Layout, Leaf, constants, flatten, map_leaves, rebuild
from poptorch.optim.host_step import as_if_compiling
from poptorch.options import Settings

NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}


@dataclass(frozen=True)
class Traced:
    """A traced step: its graph, with a GRADIENT output per trained parameter, and the layout of its result."""

    graph: StepGraph
    result: Layout


def trace_step(module: nn.Module, call: Call, settings: Settings, scales: tuple[InputSpec, ...] = ()) -> Traced:
    """Trace forward, and for training also backward; the module is left exactly as it was.

    `scales` are inputs of the graph that the gradient of the loss is multiplied with where it starts.
    """
    try:
        return _Trace(module, call, settings, scales, has_values=False).run()
    except Exception as error:
        if not isinstance(error, ValuesNeeded):
            logger.debug("tracing without values failed (%s: %s), tracing the first batch", type(error).__name__, error)
    try:
        return _Trace(module, call, settings, scales, has_values=True).run()
    except ValuesNeeded as error:
        raise _not_captured(error.__cause__ or error) from error
    except Error:
        raise
    except Exception as error:
        if raised_by_user(error.__traceback__) or not (isinstance(error, RuntimeError) or _is_tracing_failure(error)):
            raise
        raise _not_captured(error) from error


class _Trace:
    """One attempt at a trace, with fake tensors or with real ones."""

    def __init__(
        self, module: nn.Module, call: Call, settings: Settings, scales: tuple[InputSpec, ...], *, has_values: bool
    ) -> None:
        self.module, self.call, self.scales, self.training = module, call, scales, settings.training
        self.parameters, self.buffers = named_state(module)
        self.watch = Watch(has_values=has_values)
        self.marks = LossMarks(settings.half_float_casting, Autocast(settings.autocasting, self.watch.running))
        self.has_values = has_values
        self.outputs: list[OutputSpec] = []
        self.result: Layout = Constant(None)

    def run(self) -> Traced:
        names = [*self.parameters, *self.buffers, *self.call.names]
        tensors = [t.detach() for t in (*self.parameters.values(), *self.buffers.values(), *self.call.tensors)]
        tensors += [torch.ones(spec.shape, dtype=spec.dtype) for spec in self.scales]
        with _quiet_tracing(self.training) as fake:
            inputs = tensors if self.has_values else [fake.from_tensor(t, static_shapes=True) for t in tensors]
            with ExitStack() as stack:
                if not self.has_values:
                    stack.enter_context(fake)
                recorder = Recorder(fake)
                recorder.record(self._step, inputs)
        self._refuse_shared_memory()
        self.watch.report()
        roles = [
            *[Role.PARAMETER] * len(self.parameters),
            *[Role.BUFFER] * len(self.buffers),
            *[Role.USER_INPUT] * len(self.call.names),
        ]
        specs = [InputSpec.of(name, role, t) for name, role, t in zip(names, roles, tensors, strict=False)]
        specs += self.scales
        graph = _finish(recorder, specs, self.outputs, tuple(guard for guard, _ in self.watch.guards))
        return Traced(graph, self.result)

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
            before = {name: _origin(tensor) for name, tensor in passed.items()}
            first_names = {id(t): name for name, t in (*self.parameters.items(), *self.buffers.items())}
            replacements = {id(tensor): passed[first_names[id(tensor)]] for _, tensor in places(self.module)}

            def changes() -> dict[str, torch.Tensor]:
                now = {**self._registered(passed), **{name: passed[name] for name in self.call.names}}
                changed = {name: tensor for name, tensor in now.items() if _origin(tensor) is not before[name]}
                return {name: _detached(tensor).to(watched[name].dtype) for name, tensor in changed.items()}

            with stand_ins(self.module, replacements), capturing(self.marks), as_if_compiling():
                outputs = self._user_outputs(self._forward([passed[name] for name in self.call.names]))
                leaves_by_name = dict(zip(self.parameters, leaves, strict=True))
                gradients = self._gradients(leaves_by_name, [*outputs, *changes().values()], scales)
                changed = changes()  # checkpointing runs parts of forward again in the backward pass
            return self._collect(outputs, changed, gradients)

    def _refuse_shared_memory(self) -> None:
        """A tensor that the step writes must not share memory with another: the graph knows each by itself."""
        written = {spec.name for spec in self.outputs if spec.role in (OutputRole.NEW_VALUE, OutputRole.GRADIENT)}
        state = [*self.parameters.items(), *self.buffers.items()]
        for name, tensor in state:
            partners = [other for other, t in state if name in written and t is not tensor and _overlap(tensor, t)]
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
        with self.marks, self.watch.following(self.module):
            return self.module(*rebuild(self.call.args, user_tensors), **rebuild(self.call.kwargs, user_tensors))

    def _registered(self, passed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is registered on the module now under the names of its parameters and buffers."""
        stand_ins = {name: passed[name] for name in (*self.parameters, *self.buffers)}
        return read_back(self.module, stand_ins, frozenset(self.buffers))

    def _user_outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors that forward returns, in device types; one that is returned twice appears once."""
        layout, tensors = flatten(result)
        outputs: list[torch.Tensor] = []
        positions: dict[fx.Node, int] = {}

        def place(index: int) -> Layout:
            tensor = self.watch.current(tensors[index])
            if not isinstance(tensor, FunctionalTensor):
                return Constant(_host_output(tensor))
            value = _narrow_result(tensor.detach())
            node = _origin(value)
            assert node is not None
            if node not in positions:
                positions[node] = len(outputs)
                outputs.append(value)
            return Leaf(positions[node])

        self.result = map_leaves(layout, place)
        for value in constants(layout):
            if _holds_traced(value):
                logger.warning("%s", _unknown_result(value))
        return outputs

    def _gradients(
        self, leaves: dict[str, torch.Tensor], results: list[torch.Tensor], scales: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Differentiate the loss; give the gradient of each parameter that it reaches."""
        if not self.training:
            return {}
        nodes = [node for node in map(_origin, results) if node is not None]
        loss = choose_loss(self.marks.marks, nodes)
        self.watch.phase = Phase.BACKWARD
        start = torch.ones_like(loss)
        if scales:
            scale = torch.stack(scales).prod()
            node = node_of(scale)
            assert node is not None
            give_name(node, "finalLossScale")
            start = start * scale.to(loss.dtype)
        torch.autograd.backward(loss, start)
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
        sparse = [name for name, grad in gradients.items() if grad is not None and grad.layout is not torch.strided]
        if sparse:
            raise CompileError(
                explain(
                    f"the gradient of {', '.join(sparse)} is sparse, and a compiled step works on dense gradients.",
                    fix="create the embedding without sparse=True",
                )
            )
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _collect(
        self, outputs: list[torch.Tensor], changed: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Everything the graph returns, and the specs that say what it is."""
        written = {_origin(value) for value in changed.values()}
        results: list[torch.Tensor] = []
        for index, value in enumerate(outputs):
            node = node_of(value)
            assert node is not None
            owner = memory_owner(node)
            if owner.op == "placeholder" or owner in written or node in written:
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
            results.append(gradient.detach())
        return [from_fun(value) for value in results]  # pyright: ignore[reportReturnType]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors use the same bytes, judged by the range that each spans."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not (a.numel() and b.numel()):
        return False
    first, second = sorted((a, b), key=lambda t: t.data_ptr())
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    return second.data_ptr() < first.data_ptr() + span * first.element_size()


def _origin(tensor: torch.Tensor) -> fx.Node | None:
    """The node that computes a tensor's value, looking through ops that only cut its history."""
    node = node_of(tensor)
    while node is not None and node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.all_input_nodes[0]
    return node


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A traced tensor without history; a plain tensor enters the graph as a constant."""
    return tensor.detach() if isinstance(tensor, FunctionalTensor) else torch.clone(tensor)


@contextmanager
def _quiet_tracing(training: bool) -> Iterator[FakeTensorMode]:
    """The surroundings of a trace: nothing the user set outside changes it, and nothing it does stays behind."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.set_grad_enabled(training),
        fx_traceback.preserve_node_meta(),
    ):
        try:
            yield fake
        finally:
            torch.clear_autocast_cache()


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


def _holds_traced(value: Any, depth: int = 4) -> bool:
    """Whether a tensor of the trace is inside an object, a few attributes and items deep."""
    if isinstance(value, (FunctionalTensor, type, nn.Module)) or not depth:
        return isinstance(value, FunctionalTensor)
    items = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {})
    return any(_holds_traced(item, depth - 1) for item in (items.values() if isinstance(items, dict) else items))


def _unknown_result(value: object) -> str:
    kind = type(value).__name__
    return explain(
        f"forward returns a {kind} that holds tensors, and this type is not known: its tensors have no values.",
        fix=f"return its tensors themselves, or teach poptorch the type: poptorch.registerCustomArgParser({kind}, ...)",
    )


def _host_output(tensor: torch.Tensor) -> torch.Tensor:
    warnings.warn(
        "Output expected to be on the IPU but is on cpu: forward returns a tensor of shape "
        f"{list(tensor.shape)} that it did not compute; it is returned with the value it has now.",
        stacklevel=2,
    )
    with _disable_current_modes():
        return tensor.detach().clone()


def _finish(
    recorder: Recorder, specs: list[InputSpec], outputs: list[OutputSpec], guards: tuple[Guard, ...]
) -> StepGraph:
    """Make a StepGraph of a trace: constants become inputs, dead ops and unused state go."""
    source = recorder.graph
    source.eliminate_dead_code()
    placeholders = [node for node in source.nodes if node.op == "placeholder"]
    pairs = list(zip(specs, placeholders, strict=True))
    written = {spec.name for spec in outputs if spec.role is OutputRole.NEW_VALUE}
    kept = [(s, n) for s, n in pairs if n.users or s.role is Role.USER_INPUT or s.name in written]
    for _, node in set(pairs) - set(kept):
        source.erase_node(node)
    constants = [node for node in source.nodes if node in recorder.constants]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[InputSpec] = []
    values: dict[str, torch.Tensor] = {}

    def add(spec: InputSpec, node: fx.Node) -> None:
        copies[node] = graph.placeholder(f"in{len(inputs)}")
        copies[node].meta = dict(node.meta)
        inputs.append(spec)

    for spec, node in kept:
        if spec.role is not Role.USER_INPUT:
            add(spec, node)
    for index, node in enumerate(constants):
        tensor = recorder.constants[node]
        spec = InputSpec.of(f"constant:{index}", Role.CONSTANT, tensor)
        values[spec.name] = tensor
        add(spec, node)
    for spec, node in kept:
        if spec.role is Role.USER_INPUT:
            add(spec, node)
    graph.output(graph.graph_copy(source, copies))  # pyright: ignore[reportArgumentType]
    draws = any(is_random(node) for node in graph.nodes)
    return StepGraph("step", graph, Signature(tuple(inputs), tuple(outputs)), guards, draws, values)


_TRACING_WORDS = (
    "FunctionalTensor",
    "FakeTensor",
    "ProxyTorchDispatchMode",
    "fake tensor",
    "tracing tensor",
    "ConstantFunctional",
    "functionalization",
    "symbolic",
    "not allocated",
)


def _is_tracing_failure(error: BaseException) -> bool:
    return any(word in str(error) for word in _TRACING_WORDS)


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
