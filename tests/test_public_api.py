"""The public names and how they are called: a change here is a change for every user, so it has to be seen."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator

import poptorch


def describe(name: str, value: object) -> Iterator[str]:
    """One line per function, and per public member of a class."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield f"{name}: {', '.join(f'{item.name}={item.value!r}' for item in value)}"
    elif isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"{name}({bases})" if bases else name
        members = {key: member for kind in reversed(value.__mro__[:-1]) for key, member in vars(kind).items()}
        for key, member in sorted(members.items()):
            if _is_public(key) and not _is_foreign(value, key):
                yield from describe(f"{name}.{key}", member)
    elif isinstance(value, property):
        yield f"{name}: property{' (settable)' if value.fset else ''}"
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"


def _is_foreign(kind: type, name: str) -> bool:
    """Whether a member comes from outside poptorch, such as `Exception.args`."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return not owner.__module__.startswith("poptorch")


def _signature(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()  # pyright: ignore
    return f"({', '.join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)})"


def test_public_api(golden):
    lines = [line for name in sorted(poptorch.__all__) for line in describe(name, getattr(poptorch, name))]
    for name, group in poptorch.Options()._groups().items():
        lines += describe(f"Options.{name}", type(group))
    golden.check("\n".join(lines))


def test_every_public_name_exists_and_is_listed_once():
    assert len(set(poptorch.__all__)) == len(poptorch.__all__)
    assert all(hasattr(poptorch, name) for name in poptorch.__all__)


def test_every_public_object_has_a_docstring():
    documented = [getattr(poptorch, name) for name in poptorch.__all__ if name not in ("__version__", "logger")]
    assert [value.__name__ for value in documented if not inspect.getdoc(value)] == []


def test_every_public_method_has_a_docstring():
    kinds = [value for name in poptorch.__all__ if isinstance(value := getattr(poptorch, name), type)]
    missing = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, member in vars(kind).items()
        if not name.startswith("_")
        and (callable(member) or isinstance(member, property))
        and not inspect.getdoc(member)
    ]
    assert missing == []
