"""Check all options together, when a model compiles: what single setters could not know, and the keys of `_Popart`.

Each value that is taken over is logged at DEBUG, so that a log shows what a model was compiled with.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping
from typing import Any, cast

from poptorch._logging import logger
from poptorch.enums import OutputMode
from poptorch.errors import Error, explain, nearest
from poptorch.options import popart_keys
from poptorch.options.distributed import DistributedOptions
from poptorch.options.group import Stored
from poptorch.options.jit import JitOptions
from poptorch.options.locations import TensorLocationOptions, TensorLocationSettings
from poptorch.options.options import Anchor, Options
from poptorch.options.precision import PrecisionOptions
from poptorch.options.training import TrainingOptions

_GROUPS = (Options, TrainingOptions, PrecisionOptions, JitOptions, DistributedOptions, TensorLocationOptions)
_DECLARED: dict[str, Stored] = {key: stored for group in _GROUPS for key, stored in group._declared().items()}  # pyright: ignore[reportPrivateUsage]

# The order matters: a bool is an int too.
_TABLES: tuple[tuple[type | tuple[type, ...], str, Collection[str]], ...] = (
    (bool, "bool", popart_keys.BOOL),
    (float, "floating point", popart_keys.FLOAT),
    (int, "uint64", popart_keys.INT),
    (str, "string", popart_keys.STRING),
    ((set, list, tuple), "set / vector", popart_keys.SEQUENCE),
    (dict, "map", popart_keys.MAP),
)
_ANCHOR_MODES = {OutputMode.Final: "FINAL", OutputMode.EveryN: "EVERYN", OutputMode.All: "ALL", OutputMode.Sum: "Sum"}


def validate(values: Mapping[str, Any]) -> None:
    """Raise `poptorch.Error` if the result of `Options.toDict()` holds anything that no model can be compiled with."""
    for key, value in values.items():
        if key in _DECLARED:
            _DECLARED[key].accept(key, value)
        else:
            _check_popart(key, value)
        _check_range(key, value)
        _check_inside(key, value)
        _report(key, value)
    if "patterns" in values and "patterns_level" not in values:
        raise Error("patterns are set, but no patterns_level: use _Popart.setPatterns(patterns, level)")
    if "use_model" in values:
        logger.info("From the user configuration: Ipu model: %s", "Enabled" if values["use_model"] else "Disabled")


def _check_popart(key: str, value: Any) -> None:
    """A key of `_Popart` must be in the table of its value's type."""
    for kind, name, table in _TABLES:
        if isinstance(value, kind):
            if key not in table:
                raise Error(_unknown(key, value, name, table))
            return
    raise Error(f"Unknown value type {type(value).__name__} for option {key}: {value!r}")


def _unknown(key: str, value: Any, kind: str, table: Collection[str]) -> str:
    elsewhere = [other for _, other, known in _TABLES if key in known]
    hint = f", but a {elsewhere[0]} option has this name" if elsewhere else nearest(key, table)
    return explain(f"Unknown {kind} option {key}{hint}", set=f"_Popart.set({key!r}, {value!r})")


def _check_range(key: str, value: Any) -> None:
    count = popart_keys.CHOICES.get(key)
    if count is not None and not 0 <= value < count:
        raise Error(f"{key} is {value!r}, which is out of range: it can be 0 to {count - 1}")
    if (key not in _DECLARED or key in popart_keys.INT) and isinstance(value, int) and value < 0:
        raise Error(f"{key} is {value}, but must not be negative")


def _check_inside(key: str, value: Any) -> None:
    """Values inside containers."""
    if key == "available_memory_proportion":
        _check_each(key, value, numbers.Real)
    elif key == "patterns":
        _check_each(key, value, bool)
    elif key in popart_keys.MAP:
        _check_each(key, value, str)
    elif key.startswith("location_"):
        known = TensorLocationSettings._declared()  # pyright: ignore[reportPrivateUsage]
        for inner in value:
            if inner not in known:
                raise Error(f"{key} has no setting {inner!r}{nearest(str(inner), known)}")
        _check_each(key, value, int)
    elif key in popart_keys.SEQUENCE:
        _check_items(key, value)


def _check_each(key: str, value: Mapping[Any, Any], kind: type) -> None:
    for inner, item in value.items():
        if not isinstance(item, kind):
            raise Error(f"Unknown value type {type(item).__name__} for option {key}[{inner}]: {item!r}")


def _check_items(key: str, value: Collection[object]) -> None:
    numeric = key in ("hardwareInstrumentations", "accumulateOuterFragmentSettings.excludedVirtualGraphs")
    for item in value:
        if not (isinstance(item, str) and (not numeric or item.isdigit())) and not (numeric and isinstance(item, int)):
            raise Error(f"Unknown value type {type(item).__name__} for option {key}: {item!r}")
        if key == "hardwareInstrumentations" and item not in (0, 1):
            raise Error(f"{key} holds {item!r}, which is out of range: it can be 0 to 1")


def _report(key: str, value: Any) -> None:
    if key == "anchored_tensors":
        for short, anchor in cast("dict[str, Anchor]", value).items():
            mode = _ANCHOR_MODES.get(anchor.output_mode) if anchor.output_mode is not None else None
            text = f"{anchor.long_name} as {short} {mode}/{anchor.output_return_period}"
            logger.debug("poptorch.Options added %s to %s", text, key)
    elif isinstance(value, dict):
        for inner, item in cast("dict[object, object]", value).items():
            logger.debug("poptorch.Options set %s[%s] to %s", key, inner, item)
    elif isinstance(value, (set, list, tuple)):
        for item in cast("Collection[object]", value):
            logger.debug("poptorch.Options added %s to %s", item, key)
    else:
        shown = int(value) if isinstance(value, int) else value
        logger.debug("poptorch.Options set %s to value %s", key, shown)
