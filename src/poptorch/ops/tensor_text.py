"""A tensor as text: rows in brackets, numbers one below the other, the middle left out if there is too much."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

_ELLIPSIS = "..."
_WIDEST_FRACTION = 4  # leading zeros after the point, from which on "auto" writes an exponent
FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")


@dataclass(frozen=True)
class TextFormat:
    """How a tensor is written."""

    summarise_threshold: int = 1000  # elements, from which on only the edges are shown; 0: never
    edge_items: int = 3  # at both ends of each dimension
    max_line_width: int = 80  # 0: no limit
    digits: int = 4  # that are significant; 0: each number as it is
    float_format: str = "auto"
    separator: str = ","
    open_bracket: str = "("
    close_bracket: str = ")"

    def data(self) -> dict[str, Any]:
        """What differs from the usual form."""
        return {name: value for name, value in asdict(self).items() if value != getattr(TextFormat, name)}


def tensor_text(title: str, tensor: torch.Tensor, how: TextFormat) -> str:
    """`title: ` and the values of a tensor. A vector is one line, a matrix a line for each row."""
    values = tensor.detach().cpu()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.double() if values.is_floating_point() else values.to(torch.int64)
    cuts = how.summarise_threshold and values.numel() > how.summarise_threshold
    edge = how.edge_items if cuts else 0
    shown = _edges(values, edge)
    number = _number_format(shown, how)
    width = max(map(len, map(number, shown.flatten().tolist())), default=0) if how.digits else 0
    return _Writer(how, edge, lambda value: f"{number(value):>{width}}").write(f"{title}: ", values)


def _edges(values: torch.Tensor, edge: int) -> torch.Tensor:
    """The part of a tensor that is shown."""
    for dim in range(values.dim()) if edge else ():
        if values.shape[dim] > 2 * edge:
            size = values.shape[dim]
            kept = torch.tensor([*range(edge), *range(size - edge, size)])
            values = values.index_select(dim, kept)
    return values


def _number_format(values: torch.Tensor, how: TextFormat) -> Callable[[Any], str]:
    """One format for all numbers, so that they have equally many digits behind the point."""
    if not values.is_floating_point():
        return str
    if how.digits == 0 or how.float_format == "none":
        precision = how.digits or 6
        return lambda value: f"{value:.{precision}g}"
    finite = values[values.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    exponent = math.floor(math.log10(largest)) if largest else 0
    scientific = how.float_format == "scientific"
    if how.float_format == "auto":
        scientific = exponent >= how.digits or exponent < -_WIDEST_FRACTION
    if scientific:
        return lambda value: f"{value:.{how.digits - 1}e}"
    decimals = max(how.digits - 1 - exponent, 0)
    return lambda value: f"{value:.{decimals}f}"


class _Writer:
    """Lines of at most a certain width; what does not fit goes on in the next, two characters further in."""

    def __init__(self, how: TextFormat, edge: int, number: Callable[[Any], str]) -> None:
        self._how, self._edge, self._number = how, edge, number

    def write(self, title: str, values: torch.Tensor) -> str:
        if values.dim() == 0:
            return title + self._number(values.item())
        return "\n".join(self._lines(title, values, 0))

    def _lines(self, start: str, values: torch.Tensor, level: int) -> list[str]:
        if values.dim() == 1:
            return self._row(start, values, level)
        lines = [start + self._how.open_bracket]
        for item in self._items(values):
            indent = " " * (level + 1)
            lines += [indent + _ELLIPSIS] if item is None else self._lines(indent, values[item], level + 1)
        return [*lines, " " * level + self._how.close_bracket]

    def _row(self, start: str, values: torch.Tensor, level: int) -> list[str]:
        numbers = values.tolist()
        words = [_ELLIPSIS if item is None else self._number(numbers[item]) for item in self._items(values)]
        lines, line = list[str](), start + self._how.open_bracket
        for index, word in enumerate(words):
            word += self._how.separator if index < len(words) - 1 else self._how.close_bracket
            is_first = not index
            if self._how.max_line_width and not is_first and len(line) + len(word) > self._how.max_line_width:
                lines.append(line)
                line = " " * (level + 2)
            line += word
        return [*lines, line if words else line + self._how.close_bracket]

    def _items(self, values: torch.Tensor) -> list[int | None]:
        """The positions that are shown, with None for those that are left out."""
        size, edge = len(values), self._edge
        if not edge or size <= 2 * edge:
            return list(range(size))
        return [*range(edge), None, *range(size - edge, size)]
