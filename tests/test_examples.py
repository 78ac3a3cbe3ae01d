"""Whatever the project shows as an example runs: README, docs, docstrings and the demo.

The `python` blocks of a page run in order and share their names, as a reader would type them. A `text` block right
after a `python` block is what that block prints; `pytest --update-golden` rewrites it.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One block of a page: where its code starts, and what the page says it prints."""

    code: str
    line: int
    printed: str | None
    span: tuple[int, int]  # of the printed text


def examples(text: str) -> list[Example]:
    return [
        Example(m["code"], text.count("\n", 0, m.start("code")), m["printed"], m.span("printed"))
        for m in BLOCK.finditer(text)
    ]


def run(example: Example, page: Path, names: dict[str, object]) -> str:
    """Run a block under the page's own name and line numbers, so that quoted source lines are right."""
    printed = io.StringIO()
    program = compile("\n" * example.line + example.code, str(page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, monkeypatch, request):
    monkeypatch.setenv("POPTORCH_ENGINE", "eager")
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    outcomes = [(example, run(example, page, names)) for example in examples(text)]
    assert outcomes, f"{page.name} has no examples"
    if request.config.getoption("--update-golden"):
        for example, printed in reversed(outcomes):
            if example.printed is not None:
                text = text[: example.span[0]] + printed + text[example.span[1] :]
        page.write_text(text, encoding="utf-8")
        return
    for example, printed in outcomes:
        if example.printed is not None:
            assert printed == example.printed, f"{page.name}, block at line {example.line + 1}"


def modules() -> list[str]:
    """Every module of ours, found without importing it."""
    files = sorted((ROOT / "src").rglob("*.py"))
    parts = [file.relative_to(ROOT / "src").with_suffix("").parts for file in files]
    return [".".join(name[:-1] if name[-1] == "__init__" else name) for name in parts]


@pytest.mark.parametrize("name", modules())
def test_docstrings(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.long
def test_a_lightning_trainer_learns_the_digits():
    command = [sys.executable, str(ROOT / "examples" / "lightning_digits.py"), "--epochs", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POPTORCH_ENGINE": "eager"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    accuracy = re.search(r"never seen: ([\d.]+)%", ran.stdout)
    assert accuracy is not None, ran.stdout
    assert float(accuracy[1]) > 96
    assert "44 calls of 8 updates" in ran.stdout
    assert re.search(r"[\d.]+ times as fast as on the CPU", ran.stdout)


@pytest.mark.long
def test_demo_learns_the_digits():
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--engine", "eager", "--epochs", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    accuracy = re.search(r"never seen: ([\d.]+)%", ran.stdout)
    assert accuracy is not None, ran.stdout
    assert float(accuracy[1]) > 97
    assert len(re.findall(r"^ +\d+ .*img/s", ran.stdout, re.MULTILINE)) == 4
    assert re.search(r"[\d.]+ times eager PyTorch", ran.stdout)


@pytest.mark.long
@pytest.mark.timeout(400)  # most of it is the C++ compiler's
@pytest.mark.skipif(shutil.which("g++") is None, reason="builds a C++ library")
def test_a_custom_op_in_cpp_trains_and_runs_on_both_engines(tmp_path):
    folder = ROOT / "examples" / "custom_op"
    built = subprocess.run([sys.executable, folder / "build.py", tmp_path], capture_output=True, text=True, check=True)
    library = built.stdout.split()[-1]
    for engine in ("eager", "inductor"):
        command = [sys.executable, folder / "train.py", "--engine", engine, "--library", library]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ran.stdout)]
        assert len(losses) == 3
        assert losses[0] > 4 > 2 > losses[1] > losses[2]
        assert "class 42" in ran.stdout
