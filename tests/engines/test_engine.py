"""Which engine runs, and what happens without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import poptorch
from models import Regression, Scale
from poptorch.engines import choose as engines
from poptorch.engines import toolchain
from poptorch.errors import EngineError

TESTS = Path(__file__).parent.parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}


def engine_of(options: poptorch.Options | None = None) -> str:
    return poptorch.inferenceModel(Scale(), options)._programs.engine.name


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("POPTORCH_ENGINE", raising=False)


def test_inductor_is_the_default_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "missing", lambda: None)
    assert engine_of() == "inductor"


def test_without_a_compiler_eager_runs_and_one_warning_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    engines.warn_once.cache_clear()
    assert engine_of() == "eager"
    assert engine_of() == "eager"
    assert sum("C++ compiler" in record.message for record in caplog.records) == 1
    assert poptorch.inferenceModel(Scale(2.0))(torch.ones(1)).item() == 2


def test_tiers_are_asked_for_by_the_environment_or_the_options(monkeypatch):
    monkeypatch.setattr(toolchain, "missing", lambda: None)
    assert engine_of(poptorch.Options().engine("tiered")) == "tiered"
    monkeypatch.setenv("POPTORCH_ENGINE", "tiered")
    assert engine_of() == "tiered"
    assert engine_of(poptorch.Options().engine("eager")) == "eager"


def test_without_a_compiler_native_code_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    with pytest.raises(poptorch.Error, match=r"no C\+\+ compiler was found(.|\n)*install g\+\+(.|\n)*eager"):
        engine_of(poptorch.Options().engine("inductor"))


class OnThisMachine:
    """An engine that compiles to its own name, or else finds that the machine cannot build anything."""

    def __init__(self, name, problem=None):
        self.name, self.problem, self.calls = name, problem, 0

    def compile(self, programs, observe=None):
        self.calls += 1
        if self.problem is not None:
            raise toolchain.CannotBuild("in vain", self.problem)
        return self.name


def test_a_machine_that_cannot_build_is_asked_once_and_warned_about_once(caplog):
    native = OnThisMachine("inductor", toolchain.Problem("g++ is broken", "repair it"))
    engine = engines.NativeWherePossible(native, OnThisMachine("eager"))
    assert engine.name == "inductor"
    assert [engine.compile(None), engine.compile(None)] == ["eager", "eager"]
    assert engine.name == "eager"
    assert native.calls == 1
    assert [record.message for record in caplog.records] == [
        "g++ is broken: models run on the eager engine, which is slower. For native code repair it."
    ]


def test_other_failures_of_native_code_stay_errors():
    class Failing(OnThisMachine):
        def compile(self, programs, observe=None):
            raise EngineError("a mistake of ours")

    with pytest.raises(EngineError, match="a mistake of ours"):
        engines.NativeWherePossible(Failing("inductor"), OnThisMachine("eager")).compile(None)


FIVE_STEPS = """
import os, sys, torch, poptorch
from models import Regression

torch.manual_seed(0)
model, plain = Regression(), Regression()
plain.load_state_dict(model.state_dict())
options = poptorch.Options()
if len(sys.argv) > 1:
    options.engine(sys.argv[1])
training = poptorch.trainingModel(model, options, torch.optim.Adam(model.parameters(), lr=0.1))
optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
for _ in range(5):
    x, target = torch.randn(4, 3), torch.randn(4, 2)
    training(x, target)
    optimizer.zero_grad()
    plain(x, target)[1].backward()
    optimizer.step()
for parameter, expected in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(parameter, expected)
print(training._programs.engine.name)
"""


def run_python(*arguments, **environment):
    """What a program prints, and what it says on standard error."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env={**os.environ, **PATHS, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_python_without_asserts_runs_eagerly_and_generates_nothing(tmp_path):
    """PyTorch's generator does parts of its work in `assert`, and all runs of Python share what it leaves behind."""
    output, errors = run_python("-O", "-c", FIVE_STEPS, "inductor", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert output == "eager\n"
    assert errors.count("[warning]") == errors.count("Python was started with -O") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("asked_by", ["nobody", "options", "environment"])
def test_without_asserts_nobody_gets_native_code(asked_by, monkeypatch, caplog):
    monkeypatch.setattr(toolchain, "without_asserts", lambda: toolchain.Problem("-O is on", "leave it out"))
    if asked_by == "environment":
        monkeypatch.setenv("POPTORCH_ENGINE", "inductor")
    engines.warn_once.cache_clear()
    options = poptorch.Options().engine("inductor") if asked_by == "options" else None
    assert [engine_of(options), engine_of(options)] == ["eager", "eager"]
    assert caplog.text.count("-O is on") == 1


@pytest.mark.skipif(toolchain.find_compiler() is None, reason="without a compiler there is nothing to break")
@pytest.mark.parametrize("answers_version", [True, False])
def test_with_a_broken_compiler_eager_runs_and_one_warning_says_why(answers_version, tmp_path):
    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    answer = f'test "$1" = --version && exec {shutil.which("g++")} "$@"\n' if answers_version else ""
    fake.write_text(f"#!/bin/sh\n{answer}echo g++: fatal error: no cc1plus >&2\nexit 1\n")
    fake.chmod(0o755)
    path = os.pathsep.join([str(fake.parent), os.environ["PATH"]])
    output, errors = run_python("-c", FIVE_STEPS, PATH=path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert output == "eager\n"
    assert errors.count("[warning]") == errors.count("g++ is broken (g++: fatal error: no cc1plus)") == 1


@pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C++ compiler")
def test_native_code_runs_where_every_warning_is_an_error():
    output, errors = run_python("-W", "error", "-c", FIVE_STEPS, "inductor")
    assert (output, errors) == ("inductor\n", "")


def test_environment_chooses_the_engine(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "eager")
    assert engine_of() == "eager"


def test_options_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "inductor")
    assert engine_of(poptorch.Options().engine("eager")) == "eager"


def test_unknown_engine_in_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "fast")
    with pytest.raises(poptorch.Error, match=r"POPTORCH_ENGINE is 'fast'.*'inductor', 'eager', 'tiered'"):
        engine_of()


def test_eager_engine_does_not_load_inductor(programs):
    """Starting at once is the point of the eager engine, and importing Inductor takes seconds."""
    programs.run(
        "import sys, torch\n"
        "model = poptorch.inferenceModel(torch.nn.Linear(2, 2), poptorch.Options().engine('eager'))\n"
        "model(torch.ones(1, 2))\n"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)\n"
    )


@pytest.mark.inductor
def test_engines_agree(engine):
    torch.manual_seed(0)
    model = Regression()
    x, target = torch.randn(4, 3), torch.randn(4, 2)
    expected = model(x, target)[1].detach()
    inference = poptorch.inferenceModel(model, poptorch.Options().engine(engine))
    torch.testing.assert_close(inference(x, target)[1], expected)


@pytest.mark.inductor
def test_model_without_inputs_and_outputs_runs(engine):
    class Nothing(torch.nn.Module):
        def forward(self):
            pass

    model = poptorch.inferenceModel(Nothing(), poptorch.Options().engine(engine))
    assert model() is None
    assert model() is None
