"""Scopes: what users say about all operations of a part of `forward`, without any effect on results."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from poptorch.capture import SCOPE, current_hints, current_path, is_capturing, leave_hints, start_hints
from poptorch.errors import OptionError, explain

ATTRIBUTES = "attributes"  # the kind of hint that `Attribute` gives


class _Scope:
    """Something that is said about all operations inside; one object may be entered again, also inside itself."""

    def __init__(self) -> None:
        self._before: list[Any] = []

    def _hint(self) -> tuple[str, Any]:
        """What is said, together with what scopes of the same kind around it say."""
        raise AssertionError("each kind of scope says something")

    def __enter__(self) -> Self:
        self._before.append(start_hints(self._hint()) if is_capturing() else None)
        return self

    def __exit__(self, *exception: Any) -> None:
        before = self._before.pop()
        if before is not None:
            leave_hints(before)


class Attribute(_Scope):
    """Attach keys and values to the operations inside; they change no result. Outside a compiled model it does nothing.

    Inner scopes add to outer ones, and win where both give the same key of the same attribute.

    >>> import poptorch
    >>> with poptorch.Attribute(__outline={"layer": "embedding"}):
    ...     pass  # operations of forward
    """

    def __init__(self, **attributes: dict[str, str]) -> None:
        for name, pairs in attributes.items():
            if not isinstance(pairs, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise OptionError(
                    explain(
                        f"Attribute takes a dictionary of texts for {name}, not {pairs!r}.",
                        fix=f'write Attribute({name}={{"key": "value"}})',
                    )
                )
            for key, value in pairs.items():
                if not (isinstance(key, str) and isinstance(value, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise OptionError(
                        explain(
                            f"the keys and values of an attribute are texts: {name} has {key!r}: {value!r}.",
                            fix=f"write {str(key)!r}: {str(value)!r}",
                        )
                    )
        self._attributes = attributes
        super().__init__()

    def _hint(self) -> tuple[str, Any]:
        """These attributes on top of those outside."""
        found = {name: dict(pairs) for name, pairs in dict(current_hints()).get(ATTRIBUTES, ())}
        for name, pairs in self._attributes.items():
            found[name] = {**found.get(name, {}), **pairs}
        return ATTRIBUTES, tuple((name, tuple(pairs.items())) for name, pairs in found.items())


class NameScope(_Scope):
    """Put `name/` in front of the names of the tensors that are computed inside, as `getTensorNames` gives them.

    >>> import poptorch
    >>> with poptorch.NameScope("encoder"):
    ...     pass  # operations of forward
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"NameScope takes a text, not {name!r}")
        self.name = name
        super().__init__()

    def _hint(self) -> tuple[str, Any]:
        """The scopes around and this one, each with the number of submodules that it is in."""
        path = current_path()
        return SCOPE, (*dict(current_hints()).get(SCOPE, ()), (len(path.split(".")) if path else 0, self.name))
