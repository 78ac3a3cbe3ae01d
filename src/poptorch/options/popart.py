"""Free-form settings of the original's graph compiler, which programs set by key."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from poptorch.errors import OptionError
from poptorch.options.checks import integer, text
from poptorch.options.group import Freezable, show


class PopartOptions(Freezable):
    """Settings by key. They are recorded as they come and checked when a model compiles; few have an effect here."""

    options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.options = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}

    def set(self, key: str, value: Any) -> Self:
        """Store a setting; keys and types are checked when a model compiles."""
        self.checkIsFrozen()
        self.options[text("_Popart.set key", key)] = value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Store the settings of the engine, a dictionary of strings."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Switch graph patterns on or off, on top of a level from 0 (none) to 3 (all)."""
        if not isinstance(patterns, dict) or not all(  # pyright: ignore[reportUnnecessaryIsInstance]
            isinstance(name, str) and isinstance(on, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
            for name, on in patterns.items()
        ):
            raise OptionError(f"setPatterns takes a dictionary of names to True or False, not {patterns!r}")
        return self.set("patterns_level", integer("setPatterns level", level)).set("patterns", dict(patterns))

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={show(value)}" for key, value in sorted(self.options.items()))
        return f"{type(self).__name__}({values})"
