"""What of the host is compared from call to call."""

from __future__ import annotations

import torch

import poptorch
from lightning_runs import Line, trainer
from poptorch.lightning.options import Clipping
from poptorch.lightning.watch import HostWatch, numbers_of


def test_clipping_is_that_of_the_trainer():
    run = trainer()
    watch = HostWatch(Line(), run)
    assert watch.clipping() == Clipping(None)
    assert not watch.clipping()
    run = trainer(gradient_clip_val=0.5, gradient_clip_algorithm="value")
    assert HostWatch(Line(), run).clipping() == Clipping(0.5, "value")


def test_the_shape_of_training_changes_with_groups_flags_and_limits():
    module, run = Line(), trainer()
    optimizer = torch.optim.SGD([module.fc.weight], lr=0.1)
    watch = HostWatch(module, run)
    seen = [watch.shape_of_training(optimizer)]
    optimizer.param_groups[0]["lr"] = 0.2
    assert watch.shape_of_training(optimizer) == seen[0]
    module.fc.bias.requires_grad_(False)
    seen.append(watch.shape_of_training(optimizer))
    optimizer.add_param_group({"params": [module.fc.bias]})
    seen.append(watch.shape_of_training(optimizer))
    module.fc.eval()
    seen.append(watch.shape_of_training(optimizer))
    run.gradient_clip_val = 1.0
    seen.append(watch.shape_of_training(optimizer))
    assert all(a != b for index, a in enumerate(seen) for b in seen[:index])


def test_versions_count_writes():
    module = Line()
    watch = HostWatch(module, trainer())
    before = watch.versions()
    with torch.no_grad():
        module.fc.bias.zero_()
    assert watch.versions() != before


def test_numbers_of_an_optimiser():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1))
    before = numbers_of(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    assert numbers_of(optimizer) != before
    own = poptorch.optim.SGD([parameter], lr=0.1, loss_scaling=2.0)
    before = numbers_of(own)
    own.loss_scaling = 4.0
    assert numbers_of(own) != before
