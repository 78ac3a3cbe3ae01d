"""Notice when the owners of a program's state put other tensors in the place of those it works on."""

from __future__ import annotations

from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn

from poptorch.model.program_state import GONE

_is_trainable = attrgetter("requires_grad")


class Seats:
    """Where owners keep tensors, and which memory those had when they were bound.

    Every call asks whether anything changed: columns can be compared without a line of Python for each tensor.
    """

    def __init__(self) -> None:
        self._tables: list[Any] = []
        self._keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._states: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []

    def watch(self, state: dict[Any, Any]) -> None:
        """Notice, too, if the entries of an optimiser's state are removed or exchanged."""
        self._states.append((state, list(state), list(state.values())))

    def add(self, table: Any, key: str) -> None:
        tensor = table[key]
        self._tables.append(table)
        self._keys.append(key)
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr())
        if isinstance(tensor, nn.Parameter):
            self._parameters.append(tensor)
            self._trainable.append(tensor.requires_grad)

    def are_unchanged(self) -> bool:
        try:
            return (
                all(map(_has_entries, self._states))
                and all(map(is_, map(getitem, self._tables, self._keys), self._tensors))
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and list(map(_is_trainable, self._parameters)) == self._trainable
            )
        except GONE:
            return False


def _has_entries(watched: tuple[dict[Any, Any], list[Any], list[Any]]) -> bool:
    """Whether a dictionary has these keys and values, compared without hashing a key, which takes longer."""
    state, keys, values = watched
    return len(state) == len(keys) and all(map(is_, state, keys)) and all(map(is_, state.values(), values))
