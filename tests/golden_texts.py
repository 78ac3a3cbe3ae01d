"""Golden texts: what a test prints, kept as a file beside the tests and reviewed as a diff.

`pytest --update-golden` rewrites the files; without it a difference fails the test.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


class Golden:
    """Compares texts with the files of one test."""

    def __init__(self, name: str, update: bool) -> None:
        self._name, self._update = name, update

    def check(self, text: str, name: str = "") -> None:
        """Fail with a diff unless `text` is what the file holds."""
        path = FOLDER / f"{name or self._name}.txt"
        text = text.rstrip() + "\n"
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path.name} does not exist yet: write it with pytest --update-golden"
        kept = path.read_text(encoding="utf-8")
        diff = difflib.unified_diff(kept.splitlines(), text.splitlines(), str(path.name), "now", lineterm="")
        assert kept == text, "\n".join(["the text differs; if that is meant, run pytest --update-golden", *diff])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files with what the tests print")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Golden files named after the test."""
    name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
    return Golden(name, update=bool(request.config.getoption("--update-golden", default=False)))
