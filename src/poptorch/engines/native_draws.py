"""Random numbers for native code, which cannot take a generator.

Draws that need no data, only a size, are made before the code runs and are inputs of it, so that dropout and its like
give the same numbers on both engines. The few others call back into Python, to `poptorch::draw`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, fx

from poptorch.engines.draws import FILLS, Op, overload_with_generator, replica_of, taking_generator
from poptorch.ir import fake_mode, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Draw:
    """Random numbers that a method fills memory with, from a generator of the user's or from that of the device."""

    fill: Callable[..., Any]
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: Generator | None
    replica: int = 0  # whose generator it is, if not one of the user's
    order: tuple[int, ...] | None = None  # strides in whose order numbers are drawn, where memory has others

    def memory(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def into(self, memory: Tensor, generator: Generator) -> Callable[[], Any]:
        """What fills memory with new numbers."""
        generator = self.own or generator
        if self.order is None:
            return partial(self.fill, memory, *self.args, generator=generator)
        ordered = torch.empty_strided(self.shape, self.order, dtype=self.dtype)
        return lambda: memory.copy_(self.fill(ordered, *self.args, generator=generator))


class Draws:
    """The numbers that a program takes beside its state and the user's tensors, in memory that it uses again."""

    def __init__(self, draws: Sequence[Draw], generators: Sequence[Generator]) -> None:
        self.memory = [draw.memory() for draw in draws]
        self._fills = [
            draw.into(tensor, generators[draw.replica]) for draw, tensor in zip(draws, self.memory, strict=True)
        ]

    def next(self) -> None:
        """New numbers."""
        for fill in self._fills:
            fill()


def _fill_below(memory: Tensor, high: int, *, generator: Generator) -> None:
    memory.random_(0, high, generator=generator)


def _fill_permutation(memory: Tensor, size: int, *, generator: Generator) -> None:
    torch.randperm(size, generator=generator, dtype=memory.dtype, out=memory)


# What fills memory with the numbers of an op: a method, and where the op's arguments for it start and end.
_METHODS: dict[Any, tuple[Callable[..., Any], slice]] = {
    **{op: (getattr(Tensor, fill.overloadpacket.__name__), slice(1, None)) for op, fill in FILLS.items()},
    aten.rand_like.default: (Tensor.uniform_, slice(1, None)),
    aten.randn_like.default: (Tensor.normal_, slice(1, None)),
    aten.randint_like.default: (_fill_below, slice(1, None)),
    aten.randint_like.low_dtype: (Tensor.random_, slice(1, None)),
    aten.rand.default: (Tensor.uniform_, slice(0, 0)),
    aten.randn.default: (Tensor.normal_, slice(0, 0)),
    aten.normal.float_float: (Tensor.normal_, slice(0, 2)),
    aten.randint.default: (_fill_below, slice(0, 1)),
    aten.randint.low: (Tensor.random_, slice(0, 2)),
    aten.randperm.default: (_fill_permutation, slice(0, 1)),
    aten.normal.float_float: (Tensor.normal_, slice(0, 2)),
}
_METHODS.update(
    {other: method for op, method in list(_METHODS.items()) if (other := overload_with_generator(op)) is not None}
)  # by which users hand over a generator of their own


def prepared(node: fx.Node) -> Draw | None:
    """What a node draws, if it needs nothing but sizes and Python numbers for that."""
    if node.target not in _METHODS:
        return None
    fill, chosen = _METHODS[node.target]
    args, value, own = node.args[chosen], value_of(node), node.kwargs.get("generator")
    if any(isinstance(arg, fx.Node) for arg in args):
        return None
    layout = (tuple(value.shape), tuple(value.stride()), value.dtype)
    order = operand_order(node)
    return Draw(fill, args, *layout, own, replica_of(node), None if order == layout[1] else order)  # pyright: ignore


def operand_order(node: fx.Node) -> tuple[int, ...] | None:
    """The strides in whose order an op draws that overwrites its operand, which are not always those of its result."""
    if node.target not in FILLS:
        return None
    (operand,) = node.all_input_nodes
    with fake_mode():
        return tuple(torch.empty_like(value_of(operand)).stride())


# Draws that depend on data call back from native code. What they draw from is known to the thread that runs the code.
_CURRENT = threading.local()


@contextmanager
def drawing_from(generator: Generator | None) -> Iterator[None]:
    """Inside, `poptorch::draw` draws from this generator."""
    _CURRENT.generator = generator
    try:
        yield
    finally:
        _CURRENT.generator = None


_GENERATORS: dict[int, Generator] = {}  # of users, by number; programs that draw from one name it so
_OF_DEVICE = -1


def _number(generator: Generator | None) -> int:
    if generator is None:
        return _OF_DEVICE
    known = next((number for number, other in _GENERATORS.items() if other is generator), len(_GENERATORS))
    _GENERATORS[known] = generator
    return known


def _parse(name: str, overload: str, tensors: Sequence[Tensor], arguments: str) -> tuple[Op, list[Any], dict[str, Any]]:
    remaining = iter(tensors)
    text = arguments.replace("'", '"')

    def fill(found: dict[str, str]) -> Any:
        if _TORCH in found:
            return getattr(torch, found[_TORCH])
        return next(remaining) if _HOLE in found else found

    args, kwargs = json.loads(text, object_hook=fill)
    return getattr(getattr(aten, name), overload), args, kwargs


_HOLE = "tensor"  # the key of an object that stands for the next tensor
_TORCH = "torch"  # the key of an object that stands for a type or a memory format


def _run(name: str, overload: str, tensors: Sequence[Tensor], arguments: str, number: int) -> Any:
    op, args, kwargs = _parse(name, overload, tensors, arguments)
    generator = _CURRENT.generator if number == _OF_DEVICE else _GENERATORS[number]
    drawn = taking_generator(op)(*args, generator=generator, **kwargs)
    return drawn.contiguous() if op is aten.bernoulli.p else drawn  # as the op gives it, however its operand lies


def _describe(name: str, overload: str, tensors: Sequence[Tensor], arguments: str, number: int) -> Any:
    op, args, kwargs = _parse(name, overload, tensors, arguments)
    takes_generator = any(argument.name == "generator" for argument in op._schema.arguments)
    return op(*args, **kwargs, **({"generator": None} if takes_generator else {}))


@torch.library.custom_op("poptorch::draw", mutates_args=())
def _draw(name: str, overload: str, tensors: Sequence[Tensor], arguments: str, number: int) -> Tensor:
    """What an op draws from a generator; its arguments are JSON text with holes for its tensors."""
    return _run(name, overload, tensors, arguments, number)


@torch.library.custom_op("poptorch::draw_two", mutates_args=())
def _draw_two(
    name: str, overload: str, tensors: Sequence[Tensor], arguments: str, number: int
) -> tuple[Tensor, Tensor]:
    """The same for an op with two results."""
    first, second = _run(name, overload, tensors, arguments, number)
    return first, second


_draw.register_fake(_describe)
_draw_two.register_fake(_describe)


def call_back(node: fx.Node, earlier: fx.Node | None) -> tuple[Any, tuple[Any, ...]]:
    """The op that draws through Python what a node draws, after an earlier one has, and its arguments."""
    op: Any = node.target
    own: Any = node.kwargs.get("generator")
    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("generator", "device", "pin_memory")}
    tensors: list[Any] = []

    def hole(value: Any) -> dict[str, str]:
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {_TORCH: str(value).removeprefix("torch.")}
        assert isinstance(value, fx.Node), f"{op} draws with {value!r}"
        tensors.append(value)
        return {_HOLE: ""}

    text = json.dumps([node.args, kwargs], default=hole).replace('"', "'")  # Inductor does not escape quotes
    if earlier is not None:  # a tensor that nobody looks at, so that the order of calls is kept
        tensors.append(earlier)
    has_two = len(op._schema.returns) == 2
    target = torch.ops.poptorch.draw_two.default if has_two else torch.ops.poptorch.draw.default
    return target, (op._schema.name.partition("::")[2], op._overloadname, tensors, text, _number(own))
