"""`custom_op`: an operation of the user's own inside a model, and `registerCustomOp`, which makes one known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from poptorch._logging import warn_once
from poptorch.capture import is_capturing, off_device
from poptorch.errors import CompileError, explain
from poptorch.ops import custom
from poptorch.ops.attributes import Attributes, checked
from poptorch.ops.custom import CustomOp, OpName
from poptorch.ops.graphcore import register_graphcore_ops
from poptorch.ops.host_call import Result, host_call

Tensors = Sequence[torch.Tensor]
register_graphcore_ops()


def registerCustomOp(
    name: str,
    domain: str,
    domain_version: int,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    shape: Callable[..., Any] | None = None,
    *,
    traced: bool = False,
) -> None:
    """Make an operation known to `custom_op`; one of the same name, domain and version is replaced.

    - `forward(inputs, attributes)` returns a tensor, or a list or tuple of tensors. It may do anything that Python can,
      and is called at its place in every micro-batch. Or it is an op of `torch.ops`, which is called with the inputs
      and with the attributes as keywords.
    - `backward(gradients, inputs, outputs, attributes)` gets a gradient for each output, and returns one for each input
      (None for an input without). If it is not given, autograd differentiates `forward`.
    - `shape(inputs, attributes)` gets tensors without values, and returns the shape of each output, or a tensor that
      has its shape and type. If it is not given, `forward` is called once with zeros when a model is compiled.
    - With `traced=True`, `forward` runs when a model is compiled, as the model's own does, and the PyTorch operations
      that it calls become a part of the program. That is faster, but nothing else that it does happens again.

    >>> import torch, poptorch
    >>> def scale(inputs, attributes):
    ...     return inputs[0] * attributes["factor"]
    >>> poptorch.registerCustomOp("Scale", "doc.example", 1, scale)
    >>> class Model(torch.nn.Module):
    ...     def forward(self, x):
    ...         return poptorch.custom_op([x], "Scale", "doc.example", 1, [x], {"factor": 3.0})[0]
    >>> poptorch.inferenceModel(Model(), poptorch.Options().engine("eager"))(torch.tensor([1.0, 2.0]))
    tensor([3., 6.])
    """
    for what, function in (("forward", forward), ("backward", backward), ("shape", shape)):
        if not callable(function) and (what == "forward" or function is not None):
            raise CompileError(f"registerCustomOp takes a function as {what}, not {function!r}.")
    op = custom.as_custom_op(forward, backward, shape, traced=traced)
    custom.register(OpName(str(domain), str(name), int(domain_version)), op)


def custom_op(
    inputs: Tensors,
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Tensors,
    attributes: Mapping[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Apply an operation of your own, found by its domain, name and version; gives a list of its outputs.

    It was registered with `registerCustomOp`, or defined in a library that the program has loaded: the operation `Cube`
    of the domain `com.acme` is `torch.ops.com_acme.Cube` or `torch.ops.com_acme.cube`. There are as many outputs as
    `example_outputs`, whose values do not matter. Attributes are numbers, texts, and lists of one of these. Training
    uses the operation's own gradient. Outside a compiled model, the outputs are zeros like `example_outputs`.
    """
    _check_tensors("inputs", inputs)
    _check_tensors("example_outputs", example_outputs)
    given, op_name = checked(attributes), OpName(str(domain), str(name), int(domain_version))
    if not is_capturing():
        return [torch.zeros_like(example) for example in example_outputs]
    op = custom.find(op_name)
    if op is None:
        raise CompileError(custom.unknown(op_name))
    outputs = list(_apply(op_name, op, list(inputs), given, example_outputs))
    if len(outputs) != len(example_outputs):
        raise CompileError(
            explain(
                f"the custom op {op_name} has {len(outputs)} outputs, but {len(example_outputs)} example_outputs.",
                fix="give one example for each output",
            )
        )
    return outputs


def _check_tensors(what: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, torch.Tensor) for value in values):
        raise CompileError(
            explain(f"{what} of custom_op is {values!r}.", fix="give a list of tensors, also if there is only one")
        )
    if what == "example_outputs" and not values:
        raise CompileError("a custom op has one output at least: give an example for each in example_outputs.")


def _apply(
    name: OpName, op: CustomOp, inputs: list[torch.Tensor], attributes: Attributes, examples: Tensors
) -> Tensors:
    with off_device():
        is_traced = op.is_traced(inputs, attributes)
    if not is_traced:
        results, is_differentiable = _describe(name, op, inputs, attributes, examples)
        return _Call.apply(_Hosted(custom.call_of(name, attributes), results, is_differentiable), *inputs)
    if op.backward is not None:
        return _Call.apply(_Traced(op, attributes), *inputs)
    return op.outputs(inputs, attributes)


def _describe(
    name: OpName, op: CustomOp, inputs: Tensors, attributes: Attributes, examples: Tensors
) -> tuple[list[Result], list[bool]]:
    """The types of the outputs, and which of them have a gradient."""
    by_autograd = op.backward is None and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    with off_device():
        if op.shape is not None:
            results = _described(name, op.shape, inputs, attributes, examples)
            return results, [result.dtype.is_floating_point for result in results]
        with torch.set_grad_enabled(by_autograd):
            outputs = op.outputs([_zeros_like(x, by_autograd and x.requires_grad) for x in inputs], attributes)
    wrong = [type(output).__name__ for output in outputs if not isinstance(output, torch.Tensor)]
    if wrong:
        raise CompileError(f"the custom op {name} returned {', '.join(wrong)} instead of tensors.")
    if by_autograd and not any(output.requires_grad for output in outputs):
        warn_once(f"the custom op {name} has no derivative: nothing that its inputs depend on is trained by it.")
    is_differentiable = [output.requires_grad if by_autograd else output.is_floating_point() for output in outputs]
    return [Result.of(output) for output in outputs], is_differentiable


def _described(
    name: OpName, shape: custom.Forward, inputs: Tensors, attributes: Attributes, examples: Tensors
) -> list[Result]:
    """What the user's function says about the outputs: a shape, or a tensor that has it, for each."""
    found = shape([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs], dict(attributes))
    is_one = isinstance(found, (torch.Tensor, torch.Size)) or all(isinstance(size, int) for size in found)
    described = [found] if is_one else list(found)
    if len(described) != len(examples):
        raise CompileError(
            f"the shape function of the custom op {name} describes {len(described)} outputs, but there are "
            f"{len(examples)} example_outputs."
        )
    return [
        Result.of(item) if isinstance(item, torch.Tensor) else Result(example.dtype, tuple(item))
        for item, example in zip(described, examples, strict=True)
    ]


def _zeros_like(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=requires_grad)


class _Derivable(Protocol):
    """An op with its attributes, as autograd needs it."""

    def compute(self, inputs: Tensors) -> Tensors: ...
    def is_differentiable(self, position: int) -> bool: ...
    def gradients(self, gradients: Tensors, inputs: Tensors, outputs: Tensors, wanted: list[int]) -> Tensors: ...


@dataclass(frozen=True)
class _Traced:
    """An op whose functions are traced."""

    op: CustomOp
    attributes: Attributes

    def compute(self, inputs: Tensors) -> Tensors:
        return self.op.outputs(inputs, self.attributes)

    def is_differentiable(self, position: int) -> bool:
        return True

    def gradients(self, gradients: Tensors, inputs: Tensors, outputs: Tensors, wanted: list[int]) -> list[Any]:
        found = self.op.gradients(gradients, inputs, outputs, self.attributes)
        return [found[index] for index in wanted]


@dataclass(frozen=True)
class _Hosted:
    """An op whose functions are called when the program runs."""

    what: list[Any]
    results: list[Result]
    differentiable: list[bool]

    def compute(self, inputs: Tensors) -> Tensors:
        return host_call(custom.FORWARD, self.what, inputs, self.results)

    def is_differentiable(self, position: int) -> bool:
        return self.differentiable[position]

    def gradients(self, gradients: Tensors, inputs: Tensors, outputs: Tensors, wanted: list[int]) -> Tensors:
        what = [*self.what, len(inputs), wanted]
        return host_call(custom.GRADIENT, what, [*gradients, *inputs, *outputs], [Result.of(inputs[i]) for i in wanted])


class _Call(torch.autograd.Function):
    """A call of an op that has a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, op: _Derivable, *inputs: torch.Tensor) -> Any:
        outputs = tuple(op.compute(inputs))
        ctx.op, ctx.count = op, len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.mark_non_differentiable(*[y for i, y in enumerate(outputs) if not op.is_differentiable(i)])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them out no second time
        inputs, outputs = saved[: ctx.count], saved[ctx.count :]
        given = [torch.zeros_like(y) if g is None else g for g, y in zip(gradients, outputs, strict=True)]
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        found = dict(zip(wanted, ctx.op.gradients(given, inputs, outputs, wanted), strict=True))
        return None, *(found.get(index) for index in range(ctx.count))
