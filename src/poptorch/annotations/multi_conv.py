"""`MultiConv`: convolutions that an IPU runs as one operation."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Self

from poptorch.capture import current_hints, is_capturing, leave_hints, next_number, start_hints
from poptorch.enums import MultiConvPartialsType, MultiConvPlanType
from poptorch.errors import CompileError, OptionError, OptionValueError, explain

MULTI_CONV = "multi_conv"  # the kind of hint on the operations inside
_PARTIALS: dict[object, str] = {
    torch.float32: "float",
    torch.float16: "half",
    MultiConvPartialsType.Float: "float",
    MultiConvPartialsType.Half: "half",
}


class MultiConv:
    """All convolutions inside are one multi-convolution on an IPU; their results are those of separate ones.

    Other operations may stand between them. An option that is one value holds for all convolutions, a list has one for
    each. Outside a compiled model it does nothing.

    >>> import torch, poptorch
    >>> with poptorch.MultiConv().availableMemoryProportions((0.8, 0.7)):
    ...     pass  # two convolutions
    """

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}
        self._open: list[Any] = []

    def availableMemoryProportions(self, value: float | list[float] | tuple[float, ...] | None) -> Self:
        """The share of a tile's memory, from 0 to 1, for temporary data: for all convolutions, or for each."""
        if value is not None and not _is_all(value, _is_number):
            raise OptionError(f"availableMemoryProportions takes a float or a list of floats, not {value!r}")
        return self._set("available_memory", value)

    def partialsTypes(self, value: torch.dtype | list[torch.dtype] | tuple[torch.dtype, ...]) -> Self:
        """The type of intermediate sums, `torch.float` or `torch.half`: of all convolutions, or of each."""
        if not _is_all(value, _is_partials_type):
            raise OptionValueError(
                explain(f"Invalid partials types: {value!r}.", fix="use torch.float, torch.half, or a list of them")
            )
        items = value if isinstance(value, (list, tuple)) else (value,)
        names = tuple(_PARTIALS[item] for item in items)
        return self._set("partials", names if isinstance(value, (list, tuple)) else names[0])

    def enableConvDithering(self, value: bool | list[bool] | tuple[bool, ...] | None) -> Self:
        """Whether each convolution starts on another tile, which spreads memory: of all convolutions, or of each."""
        if value is not None and not _is_all(value, lambda item: isinstance(item, bool)):
            raise OptionValueError(f"enableConvDithering takes True, False or a list of them, not {value!r}")
        return self._set("dithering", value)

    def planType(self, value: MultiConvPlanType | None) -> Self:
        """Whether the convolutions run side by side (the default) or one after another."""
        if value is not None and not isinstance(value, MultiConvPlanType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                explain(f"Invalid plan type: {value!r}.", fix="use a member of poptorch.MultiConvPlanType")
            )
        return self._set("plan", None if value is None else value.name)

    def perConvReservedTiles(self, value: int) -> Self:
        """How many tiles each convolution gets at least when they run side by side."""
        if not isinstance(value, int) or isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"perConvReservedTiles takes an int, not {value!r}")
        return self._set("reserved_tiles", value)

    def cycleBackOff(self, value: float) -> Self:
        """How many cycles, as a share of the best plan's, may be given up to save tiles."""
        if not isinstance(value, float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"cycleBackOff takes a float, not {value!r}")
        return self._set("cycle_back_off", value)

    def _set(self, name: str, value: Any) -> Self:
        self._options.pop(name, None)
        if value is not None:
            self._options[name] = tuple(value) if isinstance(value, (list, tuple)) else value
        return self

    def __enter__(self) -> Self:
        if not is_capturing():
            self._open.append(None)
            return self
        if MULTI_CONV in dict(current_hints()):
            raise CompileError(
                explain(
                    "Nested poptorch.MultiConv is not supported: there is another one around this.",
                    fix="end the outer MultiConv before this one starts, or leave one of them out",
                )
            )
        hint = (MULTI_CONV, (("scope", next_number()), *self._options.items()))
        self._open.append((hint, start_hints(hint)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        opened = self._open.pop()
        if opened is None:
            return
        hint, before = opened
        leave_hints(before)
        if kind is None and not _has_convolution(hint):
            raise CompileError(
                explain(
                    "Unexpected end_multi_conv: there is no convolution inside this poptorch.MultiConv.",
                    fix="move the convolutions inside, or leave MultiConv out",
                )
            )


def _has_convolution(hint: Any) -> bool:
    from poptorch.capture.hints import recorded_with  # takes a while to import, and a capture has done so already

    return any(node.target is torch.ops.aten.convolution.default for node in recorded_with(hint))


def _is_all(value: Any, accepts: Any) -> bool:
    """Whether a value, or each item of a list that is not empty, is accepted."""
    return bool(value) and all(map(accepts, value)) if isinstance(value, (list, tuple)) else accepts(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_partials_type(value: Any) -> bool:
    return isinstance(value, (torch.dtype, MultiConvPartialsType)) and value in _PARTIALS
