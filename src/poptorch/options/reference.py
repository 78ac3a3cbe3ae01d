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
    """One option for a reader: how it is called, where it is stored with which default, and what it does."""

    call: str
    stored: str
    sentence: str


def rows() -> Iterator[Row]:
    """Every option, in the order of the declarations."""
    for prefix, group in GROUPS.items():
        for definition in group._definitions.values():  # pyright: ignore[reportPrivateUsage]
            parameters = list(inspect.signature(getattr(group, definition.method)).parameters.values())[1:]
            names = ", ".join(p.name if p.default is p.empty else f"{p.name}=…" for p in parameters)
            yield Row(f"{prefix}{definition.method}({names})", _stored(definition), definition.sentence)


def _stored(definition: Definition) -> str:
    own = [f"{key} (unset)" if at.is_absent else f"{key}={show(at.default)}" for key, at in definition.stored.items()]
    return ", ".join([*own, *(f"_Popart {key}" for key in definition.popart_keys)])


def reference() -> str:
    """Every option with its documentation, and the name and default of what it stores, as text."""
    lines = list[str]()
    for row in rows():
        lines += [row.call, f"    {row.sentence}", *([f"    stored: {row.stored}"] if row.stored else [])]
    return "\n".join(lines)
