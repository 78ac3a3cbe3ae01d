"""The wrapper of a LightningModule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_runs import Line, fit, loader
from poptorch.lightning import LightningIPUModule


def test_it_wraps_lightning_modules_only():
    with pytest.raises(ValueError, match="not a Linear"):
        LightningIPUModule(nn.Linear(1, 1))


def test_without_a_trainer_it_is_the_module():
    module = Line()
    wrapper = LightningIPUModule(module)
    x = torch.ones(2, 32)
    assert torch.equal(wrapper(x), module(x))
    assert wrapper.module is wrapper.lightning_module is module
    assert list(wrapper.state_dict()) == ["_forward_module.fc.weight", "_forward_module.fc.bias"]


def test_after_a_run_it_is_the_module():
    module = Line()
    wrapper = fit(module, loader(8)).strategy.model
    x = torch.ones(2, 32)
    assert torch.equal(wrapper(x), module(x))
