"""The state of a training program stays with its owners: what is removed or replaced there is noticed."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

import poptorch
from models import Regression, Scale

o = poptorch.optim


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def clear(model, optimizer):
    optimizer.state.clear()


def delete_one(model, optimizer):
    del optimizer.state[model.fc.bias]


def replace_all(model, optimizer):
    optimizer.state = defaultdict(dict)


def replace_one(model, optimizer):
    optimizer.state[model.fc.weight] = {}


def exchange_copies(model, optimizer):
    for parameter, entries in list(optimizer.state.items()):
        optimizer.state[parameter] = {key: value * 0.5 for key, value in entries.items()}


def move_to_the_end(model, optimizer):
    optimizer.state[model.fc.weight] = optimizer.state.pop(model.fc.weight)


CHANGES = [clear, delete_one, replace_all, replace_one, exchange_copies, move_to_the_end]
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True),
    "captured": lambda p: torch.optim.NAdam(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.5),
    "ours": lambda p: o.AdamW(p, lr=0.05),
}


class Twins:
    """A model that poptorch trains and one that plain PyTorch trains."""

    def __init__(self, make, engine="eager", accumulation=1) -> None:
        torch.manual_seed(0)
        self.model = Regression()
        self.plain = copy.deepcopy(self.model)
        self.optimizer, self.plain_optimizer = make(self.model.parameters()), make(self.plain.parameters())
        options = poptorch.Options().engine(engine)
        options.Training.gradientAccumulation(accumulation)
        self.training = poptorch.trainingModel(self.model, options, self.optimizer)

    def train(self, *seeds) -> None:
        for seed in seeds:
            self.training(*batch(seed))
            self.plain_optimizer.zero_grad()
            self.plain(*batch(seed))[1].backward()
            self.plain_optimizer.step()

    def change(self, change) -> None:
        change(self.model, self.optimizer)
        change(self.plain, self.plain_optimizer)

    def check(self) -> None:
        ours, plain = self.optimizer.state_dict(), self.plain_optimizer.state_dict()
        torch.testing.assert_close(self.model.state_dict(), self.plain.state_dict(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["state"], plain["state"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_is_removed_or_replaced_counts_from_the_next_call_on(kind, change):
    twins = Twins(KINDS[kind])
    twins.train(0, 1, 2)
    twins.change(change)
    twins.train(3, 4)
    twins.check()


@pytest.mark.inductor
def test_cleared_state_on_every_engine(engine):
    twins = Twins(KINDS["adam"], engine)
    twins.train(0, 1)
    twins.change(clear)
    twins.train(2, 3)
    twins.check()


def test_cleared_state_with_accumulation():
    twins = Twins(KINDS["adam"], accumulation=2)
    twins.train(0, 1)
    twins.change(clear)
    twins.train(2)
    twins.check()


def test_a_cleared_state_is_empty_until_the_next_call():
    twins = Twins(KINDS["ours"])
    twins.train(0)
    twins.optimizer.state.clear()
    found = twins.optimizer.state_dict()
    assert found["state"] == {}
    assert found["ipu_state"] == {}
    assert len(twins.optimizer.state) == 0
    twins.training(*batch(1))
    assert twins.optimizer.state[twins.model.fc.weight]["step"] == 1


def test_a_momentum_that_is_popped_starts_again():
    """As torch's SGD does it."""
    twins = Twins(KINDS["sgd"])
    twins.train(0, 1)
    twins.change(lambda model, optimizer: optimizer.state[model.fc.weight].pop("momentum_buffer"))
    twins.train(2)
    twins.check()


@pytest.mark.parametrize("kind", ["adam", "captured"])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_an_entry_that_is_popped_starts_again_and_the_others_stay(kind, key):
    """Torch's own step() raises a KeyError; here the entry alone has its first value again."""
    make = KINDS[kind]
    twins = Twins(make)
    twins.train(0, 1)
    first = {"step": torch.tensor(0.0)}
    for model, optimizer in ((twins.plain, twins.plain_optimizer), (twins.model, twins.optimizer)):
        entries = optimizer.state[model.fc.weight]
        zero = first.get(key, torch.zeros_like(model.fc.weight))
        if optimizer is twins.optimizer:
            entries.pop(key)
        else:
            entries[key] = zero
    twins.train(2, 3)
    twins.check()


class Eager(torch.optim.Optimizer):
    """Makes its state when it is built, and its step() cannot do without."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p]["velocity"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["velocity"].mul_(0.9).add_(p.grad)
            p.sub_(self.state[p]["velocity"] * self.param_groups[0]["lr"])


def test_state_that_only_the_constructor_makes_is_missed_in_words():
    twins = Twins(Eager)
    twins.train(0)
    kept = dict(twins.optimizer.state)
    twins.optimizer.state.clear()
    with pytest.raises(poptorch.Error, match=r"optimiser Eager has no velocity for parameter fc\.weight"):
        twins.training(*batch(1))
    twins.optimizer.state.update(kept)
    twins.train(1)
    twins.check()


def test_captured_state_of_a_replacement_is_fresh_after_it_is_cleared():
    """The optimiser that was there before still has its own, which must not come back."""
    twins = Twins(KINDS["captured"])
    twins.train(0, 1)
    other = KINDS["captured"](twins.model.parameters())
    twins.training.setOptimizer(other)
    twins.train(2)
    twins.optimizer = other
    twins.change(clear)
    twins.train(3, 4)
    twins.check()


def test_looking_at_the_state_binds_nothing_anew(monkeypatch):
    """A call whose state nobody touched works on the tensors that it has."""
    model = Regression()
    optimizer = o.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, poptorch.Options().engine("eager"), optimizer)
    training(*batch(0))
    optimizer.state_dict()
    monkeypatch.setattr(training._session, "bind", lambda state: pytest.fail("bound again"))
    training(*batch(1))
    assert len(optimizer.state) == 0


class Conjugates(nn.Module):
    """Tensors that torch only marks as conjugated or negated: their memory holds something else."""

    def __init__(self) -> None:
        super().__init__()
        z = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        conjugates = [row.clone().conj() for row in z]
        self.p, self.q = nn.Parameter(conjugates[0]), nn.Parameter(conjugates[1].imag)
        self.register_buffer("b", conjugates[2])
        self.constant = conjugates[3]

    def forward(self, x):
        y = self.p * x + self.q + self.b * self.constant
        with torch.no_grad():
            self.b.copy_((self.b * x).conj())
        return y, poptorch.identity_loss((y.abs() ** 2).sum(), reduction="none")


@pytest.mark.inductor
def test_conjugated_and_negated_views_mean_what_they_show(engine):
    model, plain = Conjugates(), Conjugates()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (model, plain))
    training = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    for seed in range(3):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        y, _ = training(x)
        expected, loss = plain(x)
        reference.zero_grad()
        loss.backward()
        reference.step()
        torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.inductor
def test_an_input_may_be_a_negated_view(engine):
    x = torch.tensor([2.0 + 3.0j]).conj().imag
    assert x.is_neg()
    assert x.is_contiguous()
    assert poptorch.inferenceModel(Scale(), poptorch.Options().engine(engine))(x).tolist() == [-6.0]


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return poptorch.identity_loss((x * self.weight + self.shift).square(), reduction="mean")


@pytest.mark.inductor
@pytest.mark.parametrize("make", [lambda x: x.to("meta"), lambda x: x.to_sparse()], ids=["without numbers", "sparse"])
@pytest.mark.parametrize("kind", ["buffer", "state"])
def test_state_that_is_no_memory_of_the_host_is_refused(kind, make, engine):
    """Native code would end the process."""
    model = Shifted()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, poptorch.Options().engine(engine), optimizer)
    training(torch.ones(2, 3))
    table, key = (model._buffers, "shift") if kind == "buffer" else (optimizer.state[model.weight], "exp_avg")
    before, weight = table[key], model.weight.detach().clone()
    table[key] = make(before)
    with pytest.raises(poptorch.Error, match=r"on the device meta|with the layout torch\.sparse_coo"):
        training(torch.ones(2, 3))
    assert torch.equal(model.weight, weight)
    table[key] = before
    training(torch.ones(2, 3))
    assert not torch.equal(model.weight, weight)
