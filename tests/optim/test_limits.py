"""What optimisers cannot do, and what an update costs."""

from __future__ import annotations

import json

import pytest
import torch

import poptorch
from optim.banks import Given, options
from optim.kinds import OURS, ROW, TORCHS, Lin, name_of, o, small, wrap


@pytest.mark.parametrize("kind", [*OURS, *TORCHS], ids=name_of)
def test_a_subclass_warns_and_its_parent_does_not(kind, caplog):
    # statement 85
    model = Given()
    wrap(model, kind(model.parameters(), lr=0.1)).destroy()
    assert "does not run Python optimizer code" not in caplog.text
    mine = type("Mine", (kind,), {})(model.parameters(), lr=0.1)
    training = wrap(model, mine)
    training.setOptimizer(mine)
    assert caplog.text.count("does not run Python optimizer code") == 1
    assert "Poptorch does not run Python optimizer code directly. Mine: it is compiled as" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimisers_that_cannot_be_compiled(kind):
    """86; Adadelta itself works here, see test_torch_optimizers."""
    model = Given()
    with pytest.raises(AssertionError, match=f"{kind.__name__} cannot be compiled"):
        wrap(model, kind(model.parameters(), lr=0.1))


def ops_of(model, optimizer):
    """The ops of the update, and how often each parameter is given a new value."""
    training = wrap(model, optimizer)
    training.compile(torch.randn(10))
    ops = json.loads(training._debugGetPopartIR())["maingraph"]
    names = training.getTensorNames()
    return [op["type"] for op in ops], sorted(name for name in names if name.startswith("UpdatedVar___"))


def test_an_update_is_no_larger_than_its_formula():
    """87: SGD is one product and one difference per parameter, from either package; others write as many parameters."""
    ours, torchs, adamw = (
        ops_of(model, kind(model.parameters(), lr=0.1))
        for model, kind in ((Lin(), o.SGD), (Lin(), torch.optim.SGD), (Lin(), o.AdamW))
    )
    assert ours == torchs
    assert ours[0].count("aten.sub.Tensor") == 2
    assert ours[1] == adamw[1] == ["UpdatedVar___lin.bias", "UpdatedVar___lin.weight"]
    assert adamw[0].count("aten.sqrt.default") == 2 + 1  # of each second moment, and of the correction of all


def test_a_new_native_optimiser_in_the_middle_of_training():
    # statement 88
    training, _ = small(torch.optim.SGD, lr=0.1)
    training(ROW)
    training.setOptimizer(torch.optim.SGD(training.model.parameters(), lr=0.001))
    before = training.model.w.detach().clone()
    training(ROW)
    torch.testing.assert_close(training.model.w.detach(), before - 0.001)


def test_outputs_refuse_backward():
    # statement 89
    training, _ = small(o.SGD, lr=0.1)
    with pytest.raises(poptorch.Error, match="backward"):
        training(ROW).backward()


@pytest.mark.parametrize(("iterations", "accumulation"), [(1, 1), (1, 3), (3, 1), (3, 5), (5, 3)])
def test_buffers_follow_micro_batches_and_weights_follow_updates(iterations, accumulation):
    # statement 94
    class Counting(Given):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, gradient):
            self.count += 1
            return super().forward(gradient)

    model = Counting()
    w0 = model.w.detach().clone()
    made = options(accumulation=accumulation).deviceIterations(iterations)
    optimizer = o.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(iterations * accumulation, 3)
    wrap(model, optimizer, made)(rows)
    assert model.count == iterations * accumulation
    torch.testing.assert_close(model.w.detach(), w0 - 0.1 * rows.sum(0) / accumulation)
