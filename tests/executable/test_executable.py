"""An executable is a value: it prints, compares, and has a name that only depends on what it does."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import poptorch
from models import Regression

PROGRAM = """
import torch, poptorch
from models import Regression
torch.manual_seed(0)
model = Regression()
options = poptorch.Options().engine("eager")
options.Training.gradientAccumulation(2)
training = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters()))
training(torch.ones(4, 3), target=torch.ones(4, 2))
print(training._executable.digest)
"""


def executable(seed: int = 0, **changes):
    torch.manual_seed(seed)
    model = Regression(outputs=changes.get("outputs", 2))
    options = poptorch.Options().runSideBySide(False)
    options.Training.gradientAccumulation(changes.get("accumulation", 2))
    training = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters(), lr=changes.get("lr", 1e-3)))
    training(torch.ones(4, 3), torch.ones(4, changes.get("outputs", 2)))
    return training._executable


def test_the_same_model_gives_an_equal_executable_whatever_its_weights_are():
    assert executable(seed=0) == executable(seed=1)
    assert executable(seed=0).digest == executable(seed=1).digest


def test_numbers_that_may_change_do_not_change_it():
    assert executable(lr=0.5).digest == executable().digest


@pytest.mark.parametrize("change", [{"outputs": 3}, {"accumulation": 1}, {"accumulation": 4}])
def test_another_program_has_another_name(change):
    assert executable(**change) != executable()
    assert executable(**change).digest != executable().digest


def test_constants_of_a_model_are_part_of_the_name():
    class Shift(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = [torch.tensor([by])]

        def forward(self, x):
            return x + self.by[0]

    def of(by):
        inference = poptorch.inferenceModel(Shift(by))
        inference(torch.ones(1))
        return inference._executable

    assert of(1.0) == of(1.0) != of(2.0)
    assert of(1.0).digest == of(1.0).digest != of(2.0).digest


def test_every_process_gives_it_the_same_name(programs):
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**environment, "PYTHONHASHSEED": seed, "POPTORCH_LOG_LEVEL": "ERR"},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "22")
    }
    assert len(found) == 1


def test_it_says_whose_its_state_is():
    text = str(executable().binding)
    assert "fc.weight: f32[2,3] parameter" in text
    assert "exp_avg of fc.weight in the state of optimiser 0" in text
    assert "lr of group 0 of optimiser 0" in text
    assert "accumulator of the program itself" in text


def test_nothing_of_the_users_is_inside():
    """Neither the module nor the optimiser can be reached: what cannot be pickled is only the graphs' own ops."""
    found, seen = [executable()], set()
    while found:
        value = found.pop()
        assert not isinstance(value, (nn.Module, torch.optim.Optimizer, nn.Parameter))
        if id(value) in seen or isinstance(value, (str, int, float, type(None), torch.dtype, torch.Tensor)):
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, set, frozenset)):
            found += value
        elif isinstance(value, dict):
            found += value.values()
        elif hasattr(value, "__dataclass_fields__"):
            found += [getattr(value, name) for name in value.__dataclass_fields__]
    assert len(seen) > 20
    assert pickle.loads(pickle.dumps(executable().schedule)) == executable().schedule
