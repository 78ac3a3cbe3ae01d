"""The documentation of all options, from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from poptorch.options.distributed import DistributedOptions
from poptorch.options.group import Definition, OptionGroup, show
from poptorch.options.jit import JitOptions
from poptorch.options.locations import TensorLocationOptions
from poptorch.options.options import Options
from poptorch.options.precision import PrecisionOptions
from poptorch.options.training import TrainingOptions

GROUPS: dict[str, type[OptionGroup]] = {
    "": Options,
    "Training.": TrainingOptions,
    "Precision.": PrecisionOptions,
    "TensorLocations.": TensorLocationOptions,
    "Distributed.": DistributedOptions,
    "Jit.": JitOptions,
}


class Row(NamedTuple):
    """One option for a reader."""

    call: str
    default: str
    sentence: str


def rows() -> Iterator[Row]:
    """Every option, in the order of the declarations."""
    for prefix, group in GROUPS.items():
        for definition in group._definitions.values():  # pyright: ignore[reportPrivateUsage]
            parameters = list(inspect.signature(getattr(group, definition.method)).parameters.values())[1:]
            names = ", ".join(p.name if p.default is p.empty else f"{p.name}=…" for p in parameters)
            yield Row(f"{prefix}{definition.method}({names})", _default(definition), definition.sentence)


def _default(definition: Definition) -> str:
    return ", ".join(show(value) for value in definition.defaults.values())


def reference() -> str:
    """Every option with its default and its documentation, as text."""
    return "\n".join(
        f"{row.call}\n    {row.sentence}" + (f"\n    default: {row.default}" if row.default else "") for row in rows()
    )
