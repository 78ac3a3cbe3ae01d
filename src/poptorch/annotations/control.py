"""Loops and branches that are part of the compiled program: `for_loop` and `cond`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from poptorch.capture import is_capturing, is_capturing_training
from poptorch.capture.source import current_user_line
from poptorch.errors import CompileError, explain

Tensors = list[torch.Tensor]


def for_loop(count: int, body: Callable[..., Any], inputs: Tensors) -> Tensors:
    """Apply `body` to the inputs, then to its own results, `count` times in all; gives the last results as a list.

    The body returns as many tensors as it takes, of the same shapes and types. It may use other tensors of `forward`,
    and parameters. Inputs are passed by value. The program contains the body once, however large `count` is. For
    inference only.

    >>> import poptorch, torch
    >>> poptorch.for_loop(10, lambda x: x * 2, [torch.ones(1)])
    [tensor([1024.])]
    """
    _require_tensors("for_loop", inputs)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"poptorch.for_loop() takes the number of iterations as an int of 0 or more, not {count!r}")
    _refuse_training("for_loop")
    if is_capturing():
        from poptorch.capture import nested  # takes a while to import, and is there when a model is captured

        return nested.repeat(count, nested.Body(_listing("for_loop", body), "poptorch.for_loop()"), inputs).results
    values = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        values = _listing("for_loop", body)(*values)
    return values


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: Tensors,
    else_body: Callable[..., Any],
    else_inps: Tensors,
) -> Tensors:
    """Apply one of two bodies, whichever a tensor with one truth value says; gives its results as a list.

    Both are part of the compiled program, and only the chosen one runs. They return as many tensors, of the same types;
    those of `then_body` get the shapes of those of `else_body`. They may use other tensors of `forward`, and
    parameters. Inputs are passed by value. For inference only.

    >>> import poptorch, torch
    >>> x = torch.tensor([3.0])
    >>> poptorch.cond(x > 2, lambda x: x - 2, [x], lambda x: x * 2, [x])
    [tensor([1.])]
    """
    _require_tensors("cond", then_inps)
    _require_tensors("cond", else_inps)
    if not isinstance(condition, torch.Tensor) or condition.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"poptorch.cond() takes a condition that is a tensor with one element, not {condition!r}")
    _refuse_training("cond")
    then, otherwise = _listing("cond", then_body), _listing("cond", else_body)
    if is_capturing():
        from poptorch.capture import nested

        bodies = [nested.Body(body, "poptorch.cond()") for body in (then, otherwise)]
        return nested.choose(condition, bodies[0], then_inps, bodies[1], else_inps, reshapes=True).results
    body, inputs = (then, then_inps) if condition else (otherwise, else_inps)
    return body(*(tensor.clone() for tensor in inputs))


def _listing(name: str, body: Callable[..., Any]) -> Callable[..., Tensors]:
    """A body whose results are always a list of tensors."""

    def run(*tensors: torch.Tensor) -> Tensors:
        results = body(*tensors)
        items: Sequence[Any] = results if isinstance(results, (list, tuple)) else [results]
        for item in items:
            if not isinstance(item, torch.Tensor):
                raise ValueError(f"the body of poptorch.{name}() returns {item!r}: it must return tensors")
        return list(items)

    return run


def _require_tensors(name: str, inputs: Any) -> None:
    if not isinstance(inputs, list):
        raise ValueError(
            f"poptorch.{name}() takes its inputs as a list of tensors, not {inputs!r} (Object is not list)"
        )
    for index, item in enumerate(inputs):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if not isinstance(item, torch.Tensor):
            raise ValueError(
                f"poptorch.{name}() takes its inputs as a list of tensors, and {item!r} is none "
                f"(Object contained in list at index {index} is not torch.tensor)"
            )


def _refuse_training(name: str) -> None:
    if is_capturing_training():
        raise CompileError(
            explain(
                f"poptorch.{name}() is only supported in inference, and this is a training model.",
                where=str(current_user_line()),
                fix="use torch.cond or torch.where for a choice" if name == "cond" else "write a Python loop",
            )
        )
