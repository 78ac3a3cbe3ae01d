"""`poptorch::host_call`: a program calls a Python function of the user's with the values of tensors.

A node names what it calls by plain data: the kind of function, a list that `json` can write and that starts with its
name, and the types of the results. So graphs can be written to files, and the function itself is looked up when the
program runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poptorch.errors import EngineError, explain

What = list[Any]  # that is called: a name that users know, and what else is needed to find and call it
Function = Callable[[What, list[torch.Tensor]], Sequence[torch.Tensor]]

_FUNCTIONS: dict[str, Function] = {}  # by kind
_TOKEN = torch.uint8  # the type of the last result, which has one element: later calls take it to wait for this one


@dataclass(frozen=True)
class Result:
    """The type of one result of a call."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Result:
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def answers(kind: str) -> Callable[[Function], Function]:
    """Let a function answer all calls of one kind."""

    def add(function: Function) -> Function:
        _FUNCTIONS[kind] = function
        return function

    return add


def host_call(
    kind: str, what: What, inputs: Sequence[torch.Tensor], results: Sequence[Result]
) -> tuple[torch.Tensor, ...]:
    """Call a function of this kind, now or, in a trace, whenever the program comes to this point."""
    types = [[str(result.dtype).removeprefix("torch."), list(result.shape)] for result in results]
    *outputs, _ = torch.ops.poptorch.host_call(list(inputs), kind, as_text(what), as_text(types), [])
    return tuple(outputs)


def as_text(data: Any) -> str:
    """Plain data as text without double quotes and backslashes, which Inductor does not escape."""
    text = json.dumps(data)
    for character, code in _ESCAPES.items():
        text = text.replace(character, code)
    return text.replace('"', "'")


def from_text(text: str) -> Any:
    """The data that `as_text` wrote."""
    text = text.replace("'", '"')
    for character, code in reversed(_ESCAPES.items()):
        text = text.replace(code, character)
    return json.loads(text)


_ESCAPES = {"%": "%25", "'": "%27", "\\": "%5C"}


def _results(text: str) -> list[Result]:
    return [Result(getattr(torch, dtype), tuple(shape)) for dtype, shape in from_text(text)]


def _run(
    inputs: list[torch.Tensor], kind: str, what: str, results: str, after: list[torch.Tensor]
) -> list[torch.Tensor]:
    outputs = list(_FUNCTIONS[kind](from_text(what), inputs))
    expected = _results(results)
    found = [Result.of(output) for output in outputs]
    if found != expected:
        raise EngineError(_changed(kind, from_text(what), expected, found))
    return [*_own_memory(inputs, outputs), torch.zeros(1, dtype=_TOKEN)]


def _own_memory(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the layout that the program expects, which share no memory with anything it has."""
    taken = {_address(tensor) for tensor in inputs}
    separate: list[torch.Tensor] = []
    for output in outputs:
        output = output.detach().contiguous()
        separate.append(output.clone() if _address(output) in taken else output)
        taken.add(_address(separate[-1]))
    return separate


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _describe(
    inputs: list[torch.Tensor], kind: str, what: str, results: str, after: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [
        *(torch.empty(result.shape, dtype=result.dtype) for result in _results(results)),
        torch.empty(1, dtype=_TOKEN),
    ]


def _changed(kind: str, what: What, expected: Sequence[Result], found: Sequence[Result]) -> str:
    return explain(
        f"{kind} {what[0]!r} returned {_listed(found)}, but the program was compiled for {_listed(expected)}.",
        fix="return tensors of the same shapes and types for all values; a compiled program has fixed sizes",
    )


def _listed(results: Sequence[Result]) -> str:
    return ", ".join(map(str, results)) or "nothing"


# Not a `torch.library.custom_op`: those run without autograd inside, by which custom ops find their derivatives.
_LIBRARY = torch.library.Library("poptorch", "FRAGMENT")
_LIBRARY.define("host_call(Tensor[] inputs, str kind, str what, str results, Tensor[] after) -> Tensor[]")
_LIBRARY.impl("host_call", _run, "CompositeExplicitAutograd")
torch.library.register_fake("poptorch::host_call", _describe)
