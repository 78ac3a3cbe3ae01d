"""PyTorch's own control flow in a model: `torch.cond`, also in training, and `torch.while_loop`.

Their functions become bodies of nested graphs. A choice is differentiated by another one, between the gradients of its
branches, which compute again what they need of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from poptorch.capture.nested import Body, Outcome, Place, Tensors, choose, repeat_as_long, truth_value
from poptorch.capture.private import (
    HigherOrderOperator,
    cond_op,
    disable_torch_function,
    function_modes,
    pytree,
    while_loop_op,
)
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
    if not torch.is_grad_enabled():
        bodies = [Body(layout.flat(function, operands), "torch.cond") for function in (true_fn, false_fn)]
        return layout.nested(choose(pred, bodies[0], [], bodies[1], []).results)
    branches = [_Branch(layout.flat(function, operands)) for function in (true_fn, false_fn)]
    bodies = [Body(branch.run, "torch.cond") for branch in branches]
    outcome = choose(pred, bodies[0], [], bodies[1], [])
    sources = list({id(source): source for branch in branches for source in branch.sources}.values())
    if not sources:
        return layout.nested(outcome.results)
    if outcome.draws:
        raise CompileError(
            explain(
                "a branch of torch.cond draws random numbers in a training model: the backward pass would draw others.",
                where=str(current_user_line()),
                fix="draw before, for example a mask for dropout, and use what was drawn in the branch",
            )
        )
    return layout.nested(_Differentiated.apply(_Choice(pred, branches, outcome), *sources))


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
    return truth_value(tensor) if tensor.numel() == 1 else tensor


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


class _Branch:
    """A branch that is differentiated.

    Leaves stand for the tensors that it takes from outside, so that no gradient goes beyond them. The backward pass
    starts from what the forward pass has left, and does not call the user's function again.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function = function
        self._results: list[torch.Tensor] = []
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors from outside that gradients belong to."""
        return [source for source, _ in self._leaves.values()]

    def run(self) -> list[torch.Tensor]:
        """What the branch computes."""
        first = torch.autograd._get_sequence_nr()
        replacing = _Replacing(self._leaves)
        with replacing.active():
            self._results = [replacing.leaf(result) for result in self._function()]
        _refuse_other_sources(self._results, [leaf for _, leaf in self._leaves.values()], first)
        return [result.detach() for result in self._results]

    def gradients(self, sources: Sequence[torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
        """From the gradients of the results to those of sources, which may be of the other branch."""
        pairs = [(result, each) for result, each in zip(self._results, given, strict=True) if result.requires_grad]
        leaves = [leaf for _, leaf in self._leaves.values()]
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if pairs and leaves:
            found = torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        known = dict(zip(self._leaves, found, strict=True))
        gradients = [known.get(id(source)) for source in sources]
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, gradients, strict=True)]


class _Choice:
    """A choice that was made in the forward pass."""

    def __init__(self, condition: torch.Tensor, branches: Sequence[_Branch], outcome: Outcome) -> None:
        self.condition, self.branches, self.outcome = condition, branches, outcome

    def gradients(self, sources: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the branch which was chosen gives."""
        otherwise, then = self.outcome.levels  # in the order in which they were recorded
        bodies = [
            Body(partial(branch.gradients, sources), "torch.cond", remakes=level)
            for branch, level in zip(self.branches, (then, otherwise), strict=True)
        ]
        return choose(self.condition, bodies[0], given, bodies[1], given).results


class _Differentiated(torch.autograd.Function):
    """The results of a choice, which depend on tensors from outside of its branches."""

    @staticmethod
    def forward(ctx: Any, choice: _Choice, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.choice, ctx.sources = choice, sources
        results = choice.outcome.results
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        return None, *ctx.choice.gradients(ctx.sources, gradients)


class _Replacing(TorchFunctionMode):
    """Lets a leaf stand for each tensor from outside of a branch that a gradient may belong to."""

    def __init__(self, leaves: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._leaves = leaves
        self._place = Place.now()
        self._outer = next(reversed(_REPLACING.get()), None)  # of the branch around this one

    def active(self) -> ExitStack:
        """Replace in functions that run inside, also in branches within this one."""
        stack = ExitStack()
        token = _REPLACING.set((*_REPLACING.get(), self))
        stack.callback(_REPLACING.reset, token)
        stack.enter_context(self)
        return stack

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in the branch."""
        with disable_torch_function():  # or to ask for an attribute of the tensor would end here again
            return self._leaf(tensor)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._outer is not None:
            tensor = self._outer.leaf(tensor)
        if id(tensor) not in self._leaves:
            if not tensor.requires_grad or not self._place.is_outside(tensor):
                return tensor
            with self._place.recording():
                self._leaves[id(tensor)] = (tensor, tensor.detach().requires_grad_())
        return self._leaves[id(tensor)][1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, named = pytree.tree_map_only(torch.Tensor, self.leaf, (args, kwargs or {}))
        return func(*given, **named)  # pyright: ignore[reportCallIssue]


_REPLACING: ContextVar[tuple[_Replacing, ...]] = ContextVar("poptorch_replacing", default=())


def _replacing() -> ExitStack:
    """The modes that replace, which PyTorch switches off while it handles a function such as `torch.cond`."""
    stack, present = ExitStack(), function_modes()
    for mode in _REPLACING.get():
        if mode not in present:
            stack.enter_context(mode)
    return stack


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor in the branch that is being differentiated, if there is one."""
    innermost = next(reversed(_REPLACING.get()), None)
    return tensor if innermost is None else innermost.leaf(tensor)


def _refuse_other_sources(results: Tensors, leaves: Tensors, first: int) -> None:
    """Raise if a gradient would go past the leaves: an `autograd.Function` may be given a tensor that no mode sees.

    `first` is the number that autograd has given to the first op of the branch.
    """
    waiting, seen = [result.grad_fn for result in results], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_leaf = hasattr(node, "variable")
        is_inside = any(node.variable is leaf for leaf in leaves) if is_leaf else node._sequence_nr() >= first
        if not is_inside:
            raise CompileError(
                explain(
                    "an autograd.Function in a branch of torch.cond takes a tensor from outside that needs a gradient.",
                    where=str(current_user_line()),
                    fix="pass the tensor to the branch as an operand: torch.cond(..., operands=(tensor,))",
                )
            )
        waiting += [function for function, _ in node.next_functions]
