"""Native code: what only the inductor engine can get wrong."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Regression
from poptorch.engines import codegen


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(16 * 6 * 6, 4)

    def forward(self, x, labels):
        scores = self.head(self.features(x))
        return scores, F.cross_entropy(scores, labels)


@pytest.mark.inductor
def test_gradients_of_a_convolution_in_channels_last_are_those_of_float64(engine):
    torch.manual_seed(0)
    model = ConvNet()
    exact, before = copy.deepcopy(model).double(), copy.deepcopy(model.state_dict())
    x, labels = torch.randn(4, 8, 14, 14), torch.tensor([0, 1, 2, 3])
    options = poptorch.Options().engine(engine)
    poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))(x, labels)
    exact(x.double(), labels)[1].backward()
    for name, parameter in exact.named_parameters():
        step = before[name] - model.state_dict()[name]
        torch.testing.assert_close(step.double(), parameter.grad, rtol=1e-4, atol=1e-6)
    if engine == "inductor":
        assert model.features[0].weight.is_contiguous(memory_format=torch.channels_last)


class Cosines(nn.Module):
    """Layers whose loops Inductor cannot join in the way it tries to first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6, 6))
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x, labels):
        hidden = F.linear(F.normalize(x), F.normalize(self.first))
        scores = self.norm(F.linear(F.normalize(hidden), F.normalize(self.second)))
        return scores, F.nll_loss(F.log_softmax(scores, 1), labels, reduction="sum")


@pytest.mark.inductor
def test_code_that_cannot_be_generated_at_first_is_generated_with_fewer_optimisations(engine):
    torch.manual_seed(0)
    model = Cosines()
    twin = copy.deepcopy(model)
    options = {"lr": 0.01, "momentum": 0.9}
    training = poptorch.trainingModel(
        model, poptorch.Options().engine(engine), torch.optim.SGD(model.parameters(), **options)
    )
    optimizer = torch.optim.SGD(twin.parameters(), **options)
    for _ in range(3):
        x, labels = torch.randn(16, 8), torch.randint(0, 6, (16,))
        training(x, labels)
        optimizer.zero_grad()
        twin(x, labels)[1].backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


@pytest.fixture
def failing(monkeypatch):
    """Lets Inductor fail; gives the reasons that it has given."""
    failures: list[str] = []

    def fail(*args, **kwargs):
        failures.append("no code today")
        raise KeyError(failures[-1])

    monkeypatch.setattr(codegen, "compile_fx_inner", fail)
    return failures


def train_step(model: nn.Module, engine: str) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine(engine).runSideBySide(False)  # two programs
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    executor(torch.ones(4, 3), torch.zeros(4, 2))
    return executor


def test_a_program_that_cannot_be_compiled_runs_on_the_eager_engine_with_one_warning(failing, monkeypatch, caplog):
    monkeypatch.setenv("POPTORCH_FALLBACK", "1")
    model = Regression()
    twin = copy.deepcopy(model)
    train_step(twin, "eager")
    executor = train_step(model, "inductor")
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert len(failing) == 4  # two programs, each of them twice
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(",")[0] for text in warnings] == [
        "the inductor engine could not compile the micro_step program",
        "the inductor engine could not compile the update program",
    ]
    assert "KeyError: 'no code today'" in warnings[0]
    executor(torch.ones(4, 3), torch.zeros(4, 2))
    assert len(failing) == 4


def test_a_program_that_cannot_be_compiled_is_an_error_on_request(failing):
    model = Regression()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(poptorch.Error, match=r"could not compile the micro_step program: KeyError: 'no code today'"):
        train_step(model, "inductor")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_nothing_stays_behind_when_code_cannot_be_generated(monkeypatch):
    """A failure in the middle of Inductor's own work, then a program that it can compile."""
    monkeypatch.setenv("POPTORCH_FALLBACK", "1")
    settings = codegen.config.save_config()
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.scheduler.Scheduler.codegen", lambda scheduler: scheduler.no_such_thing)
        train_step(Regression(), "inductor")
    assert codegen.config.save_config() == settings
    monkeypatch.setenv("POPTORCH_FALLBACK", "0")
    model = Regression()
    twin = copy.deepcopy(model)
    train_step(model, "inductor")
    train_step(twin, "eager")
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
