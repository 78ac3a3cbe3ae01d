"""PyTorch's own control flow in a model: `torch.cond`, also in training, and `torch.while_loop`.

Their functions become bodies of nested graphs. A choice is differentiated by another one, between the gradients of its
branches, which compute again what they need of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from poptorch.capture.nested import Body, Outcome, Tensors, choose, repeat_as_long
from poptorch.capture.source import current_user_line
from poptorch.errors import CompileError, explain

_NOT_SUPPORTED = ("scan", "associative_scan", "map_impl", "while_loop_stack_output")


def higher_order_replacement(operator: HigherOrderOperator) -> Callable[..., Any] | None:
    """What to call instead of an operator that takes functions, if there is something."""
    known = {cond_op: _cond, while_loop_op: _while_loop}.get(operator)
    if known is not None:
        return torch.compiler.disable(known)  # torch.cond calls it through dynamo, which must leave our code alone
    return _refuse(operator) if operator.__name__ in _NOT_SUPPORTED else None


def _refuse(operator: HigherOrderOperator) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CompileError(
            explain(
                f"{operator.__name__.removesuffix('_impl')} of PyTorch is not supported in a compiled model.",
                where=str(current_user_line()),
                fix="use torch.while_loop or poptorch.for_loop, a Python loop, or an op on the whole tensor",
            )
        )

    return refuse


def _cond(pred: torch.Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    layout = _Layout()
    bodies = [Body(layout.flat(function, operands), "torch.cond") for function in (true_fn, false_fn)]
    is_differentiated = torch.is_grad_enabled()
    with torch.no_grad():
        choice = choose(pred, bodies[0], [], bodies[1], [])
    sources = [tensor for tensor in choice.outside if tensor.requires_grad]
    if not is_differentiated or not sources:
        return layout.nested(choice.results)
    if choice.draws:
        raise CompileError(
            explain(
                "a branch of torch.cond draws random numbers in a training model: the backward pass would draw others.",
                where=str(current_user_line()),
                fix="draw before, for example a mask for dropout, and use what was drawn in the branch",
            )
        )
    return layout.nested(_Differentiated.apply(_Branches(pred, bodies, choice), *sources))


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Tensors, additional: Tensors, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    if not all(isinstance(value, torch.Tensor) for value in carried):
        raise CompileError(
            explain(
                "torch.while_loop carries something that is not a tensor.",
                where=str(current_user_line()),
                fix="carry numbers as tensors, for example torch.zeros((), dtype=torch.int64)",
            )
        )
    what = "torch.while_loop"
    condition = Body(lambda *tensors: [_truth(cond_fn(*tensors, *additional))], what, may_write=False)
    body = Body(lambda *tensors: list(body_fn(*tensors, *additional)), what, may_write=False)
    is_differentiated = torch.is_grad_enabled()
    with torch.no_grad():
        loop = repeat_as_long(condition, body, carried)
    if is_differentiated and any(tensor.requires_grad for tensor in (*carried, *loop.outside)):
        raise CompileError(
            explain(
                "torch.while_loop cannot be differentiated, and what it computes depends on parameters.",
                where=str(current_user_line()),
                fix="write a Python loop of fixed length, or put the loop under torch.no_grad()",
            )
        )
    return tuple(loop.results)


def _truth(value: Any) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(bool(value))
    return tensor.reshape(()) if tensor.numel() == 1 else tensor


class _Layout:
    """How the results of branches are nested: those of both in the same way."""

    def __init__(self) -> None:
        self._spec: Any = None

    def flat(self, function: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Tensors]:
        """A function without arguments that returns a flat list of tensors."""

        def run() -> list[torch.Tensor]:
            with _replacing():
                given = pytree.tree_map_only(torch.Tensor, _leaf, operands)
                results, spec = pytree.tree_flatten(function(*given))
            if self._spec is not None and spec != self._spec:
                raise CompileError(
                    explain(
                        f"the branches of torch.cond return different structures: {self._spec} and {spec}.",
                        where=str(current_user_line()),
                        fix="return the same structure of tensors from both",
                    )
                )
            self._spec = spec
            return [result if isinstance(result, torch.Tensor) else torch.tensor(result) for result in results]

        return run

    def nested(self, results: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(list(results), self._spec)


class _Branches:
    """A choice that was made in the forward pass."""

    def __init__(self, condition: torch.Tensor, bodies: Sequence[Body], choice: Outcome) -> None:
        self.condition, self.bodies, self.choice = condition, bodies, choice


class _Differentiated(torch.autograd.Function):
    """The results of a choice, which depend on tensors from outside of its branches."""

    @staticmethod
    def forward(ctx: Any, branches: _Branches, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.branches = branches
        ctx.save_for_backward(*sources)
        exact = [result for result in branches.choice.results if not result.is_floating_point()]
        ctx.mark_non_differentiable(*exact)
        return tuple(branches.choice.results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        sources, branches = ctx.saved_tensors, ctx.branches
        bodies = [Body(_gradients(body, sources), "torch.cond") for body in branches.bodies]
        choice = choose(branches.condition, bodies[0], list(gradients), bodies[1], list(gradients))
        return None, *choice.results


def _gradients(body: Body, sources: Sequence[torch.Tensor]) -> Callable[..., Tensors]:
    """From the gradients of what a branch gives to those of what it takes from outside."""

    def run(*gradients: torch.Tensor) -> list[torch.Tensor]:
        leaves = [source.detach().requires_grad_() for source in sources]
        with torch.enable_grad(), _Replacing(sources, leaves).active():
            results = [_leaf(result) for result in body.function()]
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if pairs:
                results, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(results, leaves, given, allow_unused=True)
        return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]

    return run


class _Replacing(TorchFunctionMode):
    """Lets leaves stand for the tensors that a branch takes from outside, so that no gradient goes beyond them."""

    def __init__(self, sources: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._leaves = {id(source): (source, leaf) for source, leaf in zip(sources, leaves, strict=True)}

    def active(self) -> ExitStack:
        """Replace in functions that run inside, also in branches within this one."""
        stack = ExitStack()
        token = _REPLACING.set((*_REPLACING.get(), self))
        stack.callback(_REPLACING.reset, token)
        stack.enter_context(self)
        return stack

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._leaves.get(id(tensor), (None, tensor))[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, named = pytree.tree_map_only(torch.Tensor, self.leaf, (args, kwargs or {}))
        return func(*given, **named)  # pyright: ignore[reportCallIssue]


_REPLACING: ContextVar[tuple[_Replacing, ...]] = ContextVar("poptorch_replacing", default=())


def _replacing() -> ExitStack:
    """The modes that replace, which PyTorch switches off while it handles a function such as `torch.cond`."""
    stack, present = ExitStack(), _get_current_function_mode_stack()
    for mode in _REPLACING.get():
        if mode not in present:
            stack.enter_context(mode)
    return stack


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor in the branches that are being differentiated."""
    for mode in _REPLACING.get():
        tensor = mode.leaf(tensor)
    return tensor
