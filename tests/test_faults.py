"""Device failures on request: users test their recovery code with them."""

from __future__ import annotations

import pytest
import torch

import poptorch
import poptorch.testing
from models import Regression
from poptorch import faults


@pytest.fixture(autouse=True)
def no_fault_stays():
    yield
    faults.FAULTS.waiting = None


def trained():
    torch.manual_seed(0)
    model = Regression()
    return model, poptorch.trainingModel(model, poptorch.Options().engine("eager"))


BATCH = (torch.ones(4, 3), torch.ones(4, 2))


@pytest.mark.parametrize(
    ("kind", "error", "action"),
    [
        ("recoverable", poptorch.RecoverableError, "FULL_RESET"),
        ("recoverable:IPU_RESET", poptorch.RecoverableError, "IPU_RESET"),
        ("unrecoverable", poptorch.UnrecoverableError, None),
    ],
)
def test_the_call_that_is_due_fails_and_later_ones_work(kind, error, action):
    model, training = trained()
    training(*BATCH)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    poptorch.testing.injectFault(kind)
    with pytest.raises(error) as caught:
        training(*BATCH)
    assert getattr(caught.value, "recovery_action", None) == action
    assert caught.value.type.startswith("poplar_")
    assert "running a model" in caught.value.location
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    training(*BATCH)
    assert not torch.equal(before["fc.weight"], model.state_dict()["fc.weight"])


def test_a_fault_can_wait_for_a_later_call():
    _, training = trained()
    poptorch.testing.injectFault("recoverable", call=3)
    training(*BATCH)
    training(*BATCH)
    with pytest.raises(poptorch.RecoverableError):
        training(*BATCH)


@pytest.mark.parametrize(("kind", "call"), [("recoverible", 1), ("recoverable", 0), ("recoverable:NO_RESET", 1)])
def test_unknown_faults_are_refused(kind, call):
    with pytest.raises(ValueError, match=r"did you mean|call 1 or later"):
        poptorch.testing.injectFault(kind, call)


def test_the_environment_can_ask_for_a_fault(monkeypatch):
    monkeypatch.setenv("POPTORCH_FAULT", "recoverable:LINK_RESET@2")
    faults.configure()
    assert faults.FAULTS.waiting == faults.Fault("recoverable:LINK_RESET", 2)


@pytest.mark.parametrize("value", ["sometimes", "recoverable@x", "recoverable@0"])
def test_a_bad_variable_is_named_with_its_value(value, monkeypatch):
    monkeypatch.setenv("POPTORCH_FAULT", value)
    with pytest.raises(ValueError, match=f"POPTORCH_FAULT is '{value}'"):
        faults.configure()
