"""Which engine runs, and what happens without a compiler."""

from __future__ import annotations

import pytest
import torch

import poptorch
from models import Regression, Scale
from poptorch.runtime import engine as engines


def engine_of(options: poptorch.Options | None = None) -> str:
    return poptorch.inferenceModel(Scale(), options)._engine.name


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("POPTORCH_ENGINE", raising=False)


def test_inductor_is_the_default_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setattr(engines, "has_compiler", lambda: True)
    assert engine_of() == "inductor"


def test_without_a_compiler_eager_runs_and_one_warning_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(engines, "has_compiler", lambda: False)
    engines.warn_once.cache_clear()
    assert engine_of() == "eager"
    assert engine_of() == "eager"
    assert sum("C++ compiler" in record.message for record in caplog.records) == 1
    assert poptorch.inferenceModel(Scale(2.0))(torch.ones(1)).item() == 2


def test_environment_chooses_the_engine(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "eager")
    assert engine_of() == "eager"


def test_options_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "inductor")
    assert engine_of(poptorch.Options().engine("eager")) == "eager"


def test_unknown_engine_in_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", "fast")
    with pytest.raises(poptorch.Error, match=r"POPTORCH_ENGINE is 'fast'.*'inductor' and 'eager'"):
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
