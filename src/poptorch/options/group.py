"""Option groups: what all objects that hold options have in common.

An option is one decorated method. The decorator declares the keys that the method stores, with their defaults; the
method holds the check, its docstring is the documentation, and its name is what config files and JSON call:

    class Options(OptionGroup):
        @option(device_iterations=Stored(int, 1, least=1))
        def deviceIterations(self, device_iterations: int) -> Self:
            '''Run the compiled step this many times for each call from Python.'''
            return self._store(device_iterations=at_least_one("deviceIterations", device_iterations))

Reading, assigning, freezing, copying, printing and `toDict` follow from these declarations.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar, cast

from typing_extensions import Self

from poptorch.errors import OptionError, nearest
from poptorch.options.checks import at_least, text

F = TypeVar("F", bound=Callable[..., Any])
_ABSENT = object()


@dataclass(frozen=True)
class Stored:
    """A value that options hold: the type it has, and what it is at the start (absent, if nothing is given)."""

    kind: type[Any]
    default: Any = _ABSENT
    least: int | None = None  # for numbers

    @classmethod
    def like(cls, default: object) -> Stored:
        """A value that starts with this default and keeps its type."""
        return cls(type(default), default)

    @property
    def is_absent(self) -> bool:
        return self.default is _ABSENT

    def accept(self, key: str, value: Any) -> Any:
        """The value as it is stored, or `OptionError` if it has another type."""
        if not isinstance(value, self.kind):
            raise OptionError(f"{key} takes {self.kind.__name__}, not {value!r} ({type(value).__name__})")
        if self.least is not None:
            at_least(self.least, key, value)
        return int(value) if self.kind is int and isinstance(value, bool) else value


@dataclass(frozen=True)
class Definition:
    """One option as a user sees it: the method that sets it, and the keys under which it is stored."""

    method: str
    stored: dict[str, Stored]
    popart_keys: tuple[str, ...]
    documentation: str

    @property
    def sentence(self) -> str:
        """The documentation in short."""
        return self.documentation.partition("\n\n")[0].replace("\n", " ")

    @property
    def defaults(self) -> dict[str, Any]:
        return {key: stored.default for key, stored in self.stored.items() if not stored.is_absent}


def option(*, popart: tuple[str, ...] = (), even_if_frozen: bool = False, **stored: Any) -> Callable[[F], F]:
    """Declare a method as the setter of an option.

    Keywords are the keys it stores: a default, whose type later values must have, or a `Stored`. `popart` lists the
    keys of `_Popart` that it sets instead.
    """

    def declare(setter: F) -> F:
        @functools.wraps(setter)
        def set_unless_frozen(self: Freezable, *args: Any, **kwargs: Any) -> Any:
            if not even_if_frozen:
                self.checkIsFrozen()
            return setter(self, *args, **kwargs)

        keys = {key: value if isinstance(value, Stored) else Stored.like(value) for key, value in stored.items()}
        documentation = inspect.cleandoc(setter.__doc__ or "")
        definition = Definition(setter.__name__, keys, popart, documentation)
        vars(set_unless_frozen)["definition"] = definition
        return cast("F", set_unless_frozen)

    return declare


class Freezable:
    """Something that can be changed until it is in use; copies of it can be changed again."""

    _is_frozen: bool

    def __init__(self) -> None:
        vars(self)["_is_frozen"] = False

    def checkIsFrozen(self) -> None:
        """Raise `AttributeError` if these options can no longer be changed."""
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: they are in use by a model or a loader. Change a copy made with clone()."
            )

    def _freeze(self) -> None:
        vars(self)["_is_frozen"] = True

    def _unfreeze(self) -> None:
        vars(self)["_is_frozen"] = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        vars(twin)["_is_frozen"] = False
        return twin


class OptionGroup(Freezable):
    """Named values with defaults, readable as attributes, changeable until frozen."""

    _values: dict[str, Any]
    _definitions: ClassVar[dict[str, Definition]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = [getattr(member, "definition", None) for member in vars(cls).values()]
        cls._definitions = cls._definitions | {d.method: d for d in own if isinstance(d, Definition)}

    def __init__(self) -> None:
        super().__init__()
        vars(self)["_values"] = {
            key: copy.copy(default) for d in self._definitions.values() for key, default in d.defaults.items()
        }

    @classmethod
    def _declared(cls) -> dict[str, Stored]:
        """Every key that this group can hold."""
        return {key: stored for d in cls._definitions.values() for key, stored in d.stored.items()}

    def _store(self, **values: Any) -> Self:
        """Store values that a setter has checked."""
        self._values.update(values)
        return self

    def set(self, **values: Any) -> Self:
        """Store values by their snake_case names; each must have the type of the option."""
        self.checkIsFrozen()
        declared = self._declared()
        for key in values:
            if key not in declared:
                raise OptionError(f"{key!r} is no option of {type(self).__name__}{nearest(key, declared)}")
        return self._store(**{key: declared[key].accept(key, value) for key, value in values.items()})

    def exists(self, key: str) -> bool:
        """Whether the option has a value; some have none until they are set."""
        return text("exists", key) in self._values

    def deleteIfExists(self, key: str) -> None:
        """Take away the value of an option that need not have one, even if the options are frozen."""
        self._values.pop(text("deleteIfExists", key), None)

    def toDict(self) -> dict[str, Any]:
        """The stored values by name."""
        return dict(self._values)

    def __call__(self, key: str) -> Any:
        if text(type(self).__name__, key) not in self._values:
            raise OptionError(f"{key!r} has no value in {type(self).__name__}{nearest(key, self._values)}")
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = vars(self).get("_values", {})
        if name in values:
            return values[name]
        known = [known for known in {*dir(type(self)), *self._declared()} if not known.startswith("_")]
        unset = " yet: it was not set" if name in self._declared() else nearest(name, known)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{unset}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or name in vars(self):
            object.__setattr__(self, name, value)
        elif name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and options take no new ones")
        else:
            self.set(**{name: value})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._shown())})"

    def _shown(self) -> list[str]:
        """`key=value` for each value, in the order of the declarations."""
        return [f"{key}={show(self._values[key])}" for key in self._declared() if key in self._values]


def show(value: Any) -> str:
    """A value as `repr` shows it, with enumeration members by name."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(value)
