"""What is said about a compilation: its phase, the part of how many, and how long it will take."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import poptorch
from models import Regression
from poptorch.engines import EagerEngine
from poptorch.model import kernels
from poptorch.model.display import Display
from poptorch.model.kernels import Task
from poptorch.progress import working_on
from poptorch.store import Cache
from poptorch.store.durations import Duration


class Line:
    """A bar that keeps what it showed."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def set_description_str(self, text: str) -> None:
        self.shown.append(text.removeprefix("Graph compilation: "))

    def refresh(self) -> None:
        pass


class Slow:
    """Names itself as native code does, and says which part it is at."""

    name = "inductor"

    def compile(self, programs, observe=None):
        for number, program in enumerate(programs, start=1):
            with working_on(f"program {number} of {len(programs)} ({program.name})"):
                pass
        return EagerEngine().compile(programs)


@pytest.fixture
def executable():
    model = Regression()
    options = poptorch.Options()
    options.runSideBySide(False).Training.gradientAccumulation(2)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(torch.ones(4, 3), torch.ones(4, 2))
    return training._executable


def task(executable, cache=None) -> Task:
    return Task(executable, list(executable.programs), cache, lambda name, graph: None, shows_progress=True)


def test_the_line_names_the_phase_and_the_program_of_how_many(executable):
    line = Line()
    display = Display(line)
    display.phase("Compiling the programs")
    task(executable).compile(Slow(), display)
    assert line.shown == [
        "Compiling the programs",
        "Compiling the programs, program 1 of 2 (micro_step)",
        "Compiling the programs, program 2 of 2 (update)",
    ]


def test_an_estimate_is_shown_while_more_than_ten_seconds_remain(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("poptorch.model.display.time.monotonic", lambda: now[0])
    display = Display(Line())
    display.phase("Compiling the programs")
    with caplog.at_level(logging.INFO, logger="poptorch::python"), display.compiling(25.0):
        now[0] = 110.0
        assert display.text == "Compiling the programs, about 15 s left"
        now[0] = 116.0
        assert display.text == "Compiling the programs"
    assert "compiling takes about 25 s" in caplog.text


def test_what_takes_less_than_ten_seconds_is_not_announced(caplog):
    with caplog.at_level(logging.INFO, logger="poptorch::python"), Display(Line()).compiling(9.0):
        pass
    assert caplog.text == ""


def test_estimates_come_from_earlier_compilations_of_the_same_folder(executable, tmp_path, caplog):
    cache = Cache(tmp_path)
    ops = sum(program.graph.count_ops() for program in executable.programs)
    cache.durations.add(Duration(ops, 33.0))
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        task(executable, cache).compile(Slow(), Display(Line()))
    assert "about 33 s" in caplog.text
    assert [each.ops for each in cache.durations.read()] == [ops, ops]


def test_only_native_code_is_announced(executable, monkeypatch):
    monkeypatch.setattr(kernels.Display, "compiling", None)
    assert task(executable).compile(EagerEngine(), Display(Line())).keys() == {"micro_step", "update"}


def test_the_line_is_silent_without_a_terminal(executable, capfd):
    task(executable).compile(Slow())
    assert not re.search("Compiling", capfd.readouterr().err)
