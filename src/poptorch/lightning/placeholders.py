"""What stands in for a value that is not known while a step is compiled, or that changes from call to call.

Some are seen by the user's step (`Pending`, `ReadLater`, `HostNumber`), the others only by the recording of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from poptorch.lightning import nested


class Slot:
    """The place of a tensor that the program computes; a leaf of nested values, which dataclasses are not."""

    def __init__(self, index: int, *, is_item: bool = False) -> None:
        self.index = index
        self.is_item = is_item  # whether the step asked for the number in it


class Kept:
    """The place of a string of the batch, which did not go through the program."""

    def __init__(self, name: str) -> None:
        self.name = name


class Count:
    """The place of a number of Lightning's, such as `global_step`, where a Python number is wanted."""

    def __init__(self, name: str) -> None:
        self.name = name


class Pending:
    """The value of a metric, which is known after the call; a step can log it or return it."""

    def __init__(self, event: int, key: str | None, fail: Callable[[], NoReturn]) -> None:
        self.event, self.key, self._fail = event, key, fail

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._fail()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        pending = next(value for _, value in nested.leaves((args, kwargs), "") if isinstance(value, Pending))
        pending._fail()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __float__ = __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __len__ = __format__ = _refuse


class ReadLater:
    """What `tensor.item()` gives in a step: the number, unless it is only logged, returned or appended to a list.

    Then nobody needs to know it before the call is over. Everything else reads it, as `tensor.item()` would.
    """

    def __init__(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any]) -> None:
        self.tensor, self._read = tensor, read

    @property
    def number(self) -> Any:
        """The value in the first batch, which becomes part of the program."""
        return self._read(self.tensor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who asks for a protocol that numbers do not have does not need the number
            raise AttributeError(name)
        return getattr(self.number, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args, kwargs = nested.mapped((args, kwargs or {}), lambda _, leaf: later_read(leaf))
        return func(*args, **kwargs)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind = self.tensor.dtype
        return float if kind.is_floating_point else bool if kind is torch.bool else int


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: ReadLater, *others: Any) -> Any:
        return function(self.number, *(later_read(other) for other in others))

    return read


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda number, other: function(other, number)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor")
for _name in (*_BINARY, "divmod"):
    _function = getattr(operator, _name, divmod)
    setattr(ReadLater, f"__{_name.rstrip('_')}__", _reading(_function))
    setattr(ReadLater, f"__r{_name.rstrip('_')}__", _reading(_reflected(_function)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "index"):
    setattr(ReadLater, f"__{_name}__", _reading(getattr(operator, _name)))
for _function in (hash, bool, int, float, complex, round, format, repr, str):
    setattr(ReadLater, f"__{_function.__name__}__", _reading(_function))


def is_read_later(value: Any) -> bool:
    """Whether this stands in for a number; `isinstance` says that it is one."""
    return type(value) is ReadLater


def later_read(value: Any) -> Any:
    """The number itself."""
    return value.number if is_read_later(value) else value


class HostNumber(float):
    """A number of an optimiser or a scheduler as it is now; whoever logs it wants it as it is at every step."""

    read: Callable[[], Any]

    @classmethod
    def of(cls, read: Callable[[], Any]) -> HostNumber:
        self = cls(read())
        self.read = read
        return self


@contextmanager
def host_numbers(trainer: Any) -> Iterator[None]:
    """Put a `HostNumber` in place of every number in the optimisers and of every last rate in the schedulers."""
    boxes: list[tuple[Any, Any, Any]] = []  # container, key, value
    for optimizer in trainer.optimizers:
        for index, group in enumerate(optimizer.param_groups):
            boxes += [(group, name, _path(optimizer, "param_groups", index, name)) for name in group]
    for config in trainer.lr_scheduler_configs:
        rates = getattr(config.scheduler, "_last_lr", [])
        boxes += [(rates, index, _path(config.scheduler, "_last_lr", index)) for index in range(len(rates))]
    changed = [(box, key, box[key], HostNumber.of(read)) for box, key, read in boxes if type(box[key]) is float]
    try:
        for box, key, _, number in changed:
            box[key] = number
        yield
    finally:
        for box, key, before, number in changed:
            if box[key] is number:  # and not what the step has set
                box[key] = before


def _path(owner: Any, attribute: str, *keys: Any) -> Callable[[], Any]:
    """Find a number by its way from its owner: loading a state replaces the dictionaries in between."""

    def read() -> Any:
        value = getattr(owner, attribute)
        for key in keys:
            value = value[key]
        return value

    return read
