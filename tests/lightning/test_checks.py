"""Ways to train that a compiled step cannot follow are refused before anything runs."""

from __future__ import annotations

import pytest
import torch

import poptorch
from lightning_runs import Line, fit, pl, sgd
from poptorch.lightning import IPUStrategy

MisErr = pl.utilities.exceptions.MisconfigurationException


class Manual(Line):
    def __init__(self, configure=None):
        super().__init__(configure)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: Manual(), "manual optimization"),
        (lambda: Manual(lambda m: [sgd(m), sgd(m)]), "IPUs currently only support one optimizer."),
        (lambda: Line(lambda m: torch.optim.LBFGS(m.parameters())), "not compatible"),
    ],
    ids=["manual", "two optimisers", "LBFGS"],
)
def test_other_ways_to_optimise_are_refused(module, text):
    with pytest.raises(MisErr, match=text):
        fit(module())


class OwnClipping(Line):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class TakesIterator(Line):
    def training_step(self, dataloader_iter):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "text"), [(OwnClipping, "configure_gradient_clipping"), (TakesIterator, "dataloader_iter")]
)
def test_hooks_that_cannot_work_are_refused(kind, text):
    with pytest.raises(MisErr, match=text):
        fit(kind())


class SkipsUpdates(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()


def test_a_step_without_an_update_is_refused():
    with pytest.raises(MisErr, match="cannot run without updating"):
        fit(SkipsUpdates())


@pytest.mark.parametrize("schedule", [{0: 1, 4: 2}, {4: 2}])
def test_an_accumulation_that_changes_is_refused(schedule):
    scheduler = pl.callbacks.GradientAccumulationScheduler(schedule)
    with pytest.raises(MisErr, match="different `accumulate_grad_batches` at different epochs"):
        fit(Line(), callbacks=[scheduler])


@pytest.mark.parametrize(
    ("configure", "options"),
    [
        (lambda m: poptorch.optim.SGD(m.parameters(), lr=0.1, max_grad_norm=1.0), None),
        (sgd, lambda options: options.Training.clipGradNorm(1.0)),
    ],
    ids=["optimiser", "options"],
)
def test_two_limits_contradict_each_other(configure, options):
    arguments = {}
    if options is not None:
        own = poptorch.Options()
        options(own)
        arguments["strategy"] = IPUStrategy(training_opts=own)
    with pytest.raises(MisErr, match="contradicts"):
        fit(Line(configure), gradient_clip_val=0.5, **arguments)
