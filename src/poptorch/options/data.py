"""Options as plain data, which JSON can hold, and back.

Values that data cannot hold, such as the functions of an autocast policy, are left out: they have done their work when
a program is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from poptorch import enums
from poptorch.options.group import OptionGroup, Stored
from poptorch.options.options import Anchor, Options
from poptorch.options.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

Data = Any  # what JSON can hold
_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Stage,
        Phase,
        PipelinedExecution,
        ShardedExecution,
        SerialPhasedExecution,
        ParallelPhasedExecution,
    )
}
_OF_THE_PROCESS = ("cachePath", "enableEngineCaching")  # not of the program


def options_data(options: Options) -> Data:
    """Everything that data can hold of options."""
    groups = options._groups()  # pyright: ignore[reportPrivateUsage]
    popart = {k: v for k, v in options._Popart.options.items() if k not in _OF_THE_PROCESS}  # pyright: ignore[reportPrivateUsage]
    return {
        "values": _known(options._values),  # pyright: ignore[reportPrivateUsage]
        "groups": {name: _known(group.toDict()) for name, group in groups.items() if isinstance(group, OptionGroup)},
        "popart": _known(popart),
        "strategy": _encode(options._execution_strategy),  # pyright: ignore[reportPrivateUsage]
    }


def _known(values: Mapping[str, Any]) -> dict[str, Data]:
    found: dict[str, Data] = {}
    for name, value in values.items():
        try:
            found[name] = _encode(value)
        except (TypeError, ValueError):
            continue
    return found


def _encode(value: Any) -> Data:
    if isinstance(value, Enum):
        return {"enum": [type(value).__name__, value.name]}
    if value is None or isinstance(value, (bool, int, float, str)):
        json.dumps(value, allow_nan=False)
        return value
    if isinstance(value, Anchor):
        return {"anchor": [_encode(item) for item in value]}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return {type(items).__name__: [_encode(item) for item in items]}
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return {"dict": [[_encode(key), _encode(item)] for key, item in pairs.items()]}
    if type(value).__name__ in _KINDS:
        return {"object": [type(value).__name__, _encode(vars(value))]}
    raise TypeError(f"{value!r} is nothing that data can hold")


def options_from(data: Data) -> Options:
    """Options with what data say, and this process's own cache; raises `ValueError` and its like for nonsense."""
    options = Options()
    _apply(options, data["values"])
    for name, group in options._groups().items():  # pyright: ignore[reportPrivateUsage]
        if isinstance(group, OptionGroup):
            _apply(group, data["groups"].get(name, {}))
    for key, value in data["popart"].items():
        if key not in _OF_THE_PROCESS:
            options._Popart.set(str(key), _decode(value))  # pyright: ignore[reportPrivateUsage]
    return options.setExecutionStrategy(_decode(data["strategy"]))


def _apply(group: OptionGroup, values: Mapping[str, Data]) -> None:
    declared: dict[str, Stored] = group._declared()  # pyright: ignore[reportPrivateUsage]
    found = {key: _decode(value) for key, value in values.items() if key in declared}
    group._store(**{key: declared[key].accept(key, value) for key, value in found.items()})  # pyright: ignore[reportPrivateUsage]


def _decode(data: Data) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = cast("dict[str, Data]", data).items()
    if kind == "enum":
        return getattr(enums, str(value[0])).__members__[value[1]]
    if kind == "anchor":
        return Anchor(*map(_decode, value))
    if kind in ("list", "tuple"):
        items = [_decode(item) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in value}
    if kind != "object":
        raise ValueError(f"{kind!r} is nothing that options hold")
    found = cast("Any", object.__new__(_KINDS[value[0]]))
    for name, item in cast("dict[str, Any]", _decode(value[1])).items():
        setattr(found, name, item)
    return found
