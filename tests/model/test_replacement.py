"""`setOptimizer` after compilation: parameters decide which numbers apply, and which are trained at all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from poptorch.model.optimizers import GROUPS_CHANGED

o = poptorch.optim
KINDS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "captured": lambda groups: torch.optim.NAdam(groups, lr=0.1),
    "ours": lambda groups: o.AdamW(groups, lr=0.1),
}


class Chain(nn.Module):
    """Two layers, of which every parameter matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return y, nn.functional.mse_loss(y, torch.ones_like(y))


def rows(seed):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def groups(*parts, lr=()):
    """A parameter group for each list of modules."""
    made = [{"params": [p for module in part for p in module.parameters()]} for part in parts]
    return [{**group, "lr": rate} for group, rate in zip(made, lr, strict=True)] if lr else made


class Twins:
    """A model that poptorch trains, and one that plain PyTorch trains."""

    def __init__(self, make, options=None) -> None:
        self.model, self.plain = Chain(), Chain()
        self.optimizer, self.reference = make(self.model), make(self.plain)
        self.training = poptorch.trainingModel(
            self.model, options or poptorch.Options().engine("eager"), self.optimizer
        )

    def train(self, *seeds) -> None:
        for seed in seeds:
            self.training(rows(seed))
            for parameter in self.plain.parameters():
                parameter.grad = None
            self.plain(rows(seed))[1].backward()
            self.reference.step()

    def replace(self, make) -> None:
        """Both get a new optimiser; plain PyTorch's is given the state of the old one."""
        self.optimizer, before, self.reference = make(self.model), self.reference, make(self.plain)
        for group in self.reference.param_groups:
            for parameter in group["params"]:
                if parameter in before.state:
                    self.reference.state[parameter] = before.state[parameter]
        self.training.setOptimizer(self.optimizer)

    def check(self) -> None:
        torch.testing.assert_close(self.model.state_dict(), self.plain.state_dict(), rtol=1e-5, atol=1e-6)
        found, expected = self.optimizer.state_dict(), self.reference.state_dict()
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-5, atol=1e-6)


def compilations(training) -> int:
    return len(training._programs.variants)


# ---- groups


@pytest.mark.parametrize("kind", KINDS)
def test_groups_in_another_order(kind):
    make = KINDS[kind]
    twins = Twins(lambda m: make(groups([m.a], [m.b], lr=(0.1, 0.5))))
    twins.train(0, 1)
    program = twins.training._executable
    twins.replace(lambda m: make(groups([m.b], [m.a], lr=(0.5, 0.1))))
    twins.train(2, 3)
    twins.check()
    assert twins.training._executable is program


@pytest.mark.parametrize("kind", KINDS)
def test_several_groups_become_one(kind):
    make = KINDS[kind]
    twins = Twins(lambda m: make(groups([m.a], [m.b], lr=(0.1, 0.5))))
    twins.train(0, 1)
    program = twins.training._executable
    twins.replace(lambda m: make(groups([m.a, m.b], lr=(0.3,))))
    twins.train(2, 3)
    twins.check()
    assert twins.training._executable is program


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_becomes_several(kind, caplog):
    """With numbers that the program has one place for, it is compiled again, once."""
    make = KINDS[kind]
    twins = Twins(lambda m: make(groups([m.a, m.b])))
    twins.train(0, 1)
    program = twins.training._executable
    twins.replace(lambda m: make(groups([m.a], [m.b], lr=(0.2, 0.2))))
    twins.train(2)
    assert twins.training._executable is program
    with caplog.at_level("INFO", logger="poptorch::python"):
        twins.replace(lambda m: make(groups([m.a], [m.b], lr=(0.2, 0.4))))
        twins.train(3, 4)
    assert caplog.text.count("compiling again") == 1
    twins.check()
    program = twins.training._executable
    twins.replace(lambda m: make(groups([m.a], [m.b], lr=(0.4, 0.2))))
    twins.train(5)
    twins.check()
    assert twins.training._executable is program


def test_a_group_that_is_split_by_hand():
    """The same object with other groups counts as it is when it is handed over."""
    twins = Twins(lambda m: KINDS["adam"](groups([m.a, m.b])))
    twins.train(0)
    for optimizer in (twins.optimizer, twins.reference):
        (group,) = optimizer.param_groups
        parts = group["params"][:2], group["params"][2:]
        optimizer.param_groups[:] = [
            {**group, "params": part, "lr": lr} for part, lr in zip(parts, (0.1, 0.3), strict=True)
        ]
    twins.training.setOptimizer(twins.optimizer)
    twins.train(1, 2)
    twins.check()


# ---- parameters


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_left_alone(kind):
    make = KINDS[kind]
    twins = Twins(lambda m: make(groups([m.a, m.b])))
    twins.train(0, 1)
    old, kept = twins.optimizer, copy.deepcopy(twins.model.b.state_dict())
    moments = copy.deepcopy(dict(old.state[twins.model.b.weight]))
    twins.replace(lambda m: make(groups([m.a])))
    assert set(twins.optimizer.state) == set(twins.model.a.parameters())
    assert len(twins.optimizer.state_dict()["state"]) == 2
    twins.train(2, 3)
    twins.check()
    torch.testing.assert_close(twins.model.b.state_dict(), kept, rtol=0, atol=0)
    torch.testing.assert_close(dict(old.state[twins.model.b.weight]), moments, rtol=0, atol=0)
    twins.replace(lambda m: make(groups([m.b, m.a])))
    twins.train(4, 5)
    twins.check()


@pytest.mark.inductor
def test_what_is_left_out_on_every_engine(engine):
    options = poptorch.Options().engine(engine)
    options.Training.gradientAccumulation(2)
    twins = Twins(lambda m: KINDS["adam"](groups([m.a, m.b])), options)
    twins.train(0)
    twins.replace(lambda m: KINDS["adam"](groups([m.b])))
    twins.train(1, 2)
    twins.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_added_is_trained(kind):
    make = KINDS[kind]
    twins = Twins(lambda m: make(groups([m.a])))
    twins.train(0, 1)
    for model, optimizer in ((twins.model, twins.optimizer), (twins.plain, twins.reference)):
        optimizer.add_param_group(groups([model.b], lr=(0.3,))[0])
    twins.training.setOptimizer(twins.optimizer)
    twins.train(2, 3)
    twins.check()


def test_a_group_that_is_added_without_set_optimizer_is_warned_about_once(caplog):
    twins = Twins(lambda m: KINDS["adam"](groups([m.a])))
    twins.train(0)
    twins.optimizer.add_param_group(groups([twins.model.b])[0])
    twins.train(1, 2)
    assert [record.message for record in caplog.records if "other groups" in record.message] == [GROUPS_CHANGED]
    twins.check()


def test_parameters_that_are_frozen_and_thawed():
    """What requires a gradient is read by setOptimizer as well."""
    twins = Twins(lambda m: KINDS["adam"](groups([m.a, m.b])))
    for is_trainable in (True, False, True):
        for model in (twins.model, twins.plain):
            model.b.requires_grad_(is_trainable)
        twins.training.setOptimizer(twins.optimizer)
        twins.train(0, 1)
        twins.check()


def test_a_parameter_that_the_loss_does_not_reach_changes_nothing():
    class Spare(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(2))

    model = Spare()
    training = poptorch.trainingModel(
        model, optimizer=torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=0.1)
    )
    training(rows(0))
    program = training._executable
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    training(rows(1))
    assert training._executable is program


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_another_model_are_refused(kind):
    twins = Twins(lambda m: KINDS[kind](groups([m.a, m.b])))
    twins.train(0)
    with pytest.raises(poptorch.Error, match="that is not part of the model"):
        twins.training.setOptimizer(copy.deepcopy(twins.optimizer))
    twins.train(1)
    twins.check()


def test_a_parameter_that_is_replaced_needs_an_optimiser_that_holds_it():
    """Plain PyTorch would go on training the old one."""
    twins = Twins(lambda m: KINDS["adam"](groups([m.a, m.b])))
    twins.train(0)
    for model in (twins.model, twins.plain):
        model.a.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(poptorch.Error, match=r"a\.bias was replaced by another one, which the optimiser does not hold"):
        twins.training(rows(1))
    assert len(twins.optimizer.state_dict()["state"]) == 4
    twins.replace(lambda m: KINDS["adam"](groups([m.a, m.b])))
    twins.train(1, 2)
    twins.check()


def test_a_frozen_parameter_may_be_replaced():
    twins = Twins(lambda m: KINDS["adam"](groups([m.a])))
    twins.train(0)
    for model in (twins.model, twins.plain):
        model.b.bias = nn.Parameter(torch.ones(3))
    twins.train(1)
    twins.check()


# ---- several optimisers


def two(model, order=(0, 1)):
    made = [torch.optim.Adam(model.a.parameters(), lr=0.1), o.SGD(model.b.parameters(), lr=0.5, momentum=0.9)]
    return [made[index] for index in order]


def test_optimisers_in_another_order():
    model, twin = Chain(), Chain()
    optimizers, references = two(model), two(twin)
    options = poptorch.Options().engine("eager")
    training, plain = (
        poptorch.trainingModel(m, options, made) for m, made in ((model, optimizers), (twin, references))
    )
    for seed in range(4):
        training.setOptimizer(optimizers[:: -1 if seed % 2 else 1])
        training(rows(seed))
        plain(rows(seed))
    training.setOptimizer(two(model, (1, 0)))
    training(rows(4))
    plain(rows(4))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_a_parameter_that_moves_to_another_optimiser_takes_its_state_along():
    model, twin = Chain(), Chain()
    optimizers = [torch.optim.Adam(part.parameters(), lr=lr) for part, lr in ((model.a, 0.1), (model.b, 0.3))]
    training = poptorch.trainingModel(model, poptorch.Options().engine("eager"), optimizers)
    training(rows(0))
    training.setOptimizer(_moved(model))
    training(rows(1))
    plain = torch.optim.Adam(groups([twin.a], [twin.b], lr=(0.1, 0.3)))
    for seed in range(2):
        if seed:
            _regroup(plain, twin)
        plain.zero_grad()
        twin(rows(seed))[1].backward()
        plain.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def _moved(model):
    """The bias of the first layer belongs to the second optimiser now."""
    parameters = [[model.a.weight], [*model.b.parameters(), model.a.bias]]
    return [torch.optim.Adam(own, lr=rate) for own, rate in zip(parameters, (0.1, 0.3), strict=True)]


def _regroup(plain, twin):
    first, second = plain.param_groups
    first["params"], second["params"] = [twin.a.weight], [*twin.b.parameters(), twin.a.bias]


# ---- what a new object starts with


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_fresh_optimiser_goes_on_with_the_state_of_the_one_before(kind):
    """Also if its constructor has made state already, as that of Adagrad does."""
    twins = Twins(lambda m: kind(m.parameters(), lr=0.1))
    twins.train(0, 1)
    old = twins.optimizer
    before = copy.deepcopy(old.state_dict()["state"])
    twins.replace(lambda m: kind(m.parameters(), lr=0.01))
    twins.train(2)
    twins.check()
    assert twins.optimizer.state[twins.model.a.weight]["step"] == 3
    torch.testing.assert_close(old.state_dict()["state"], before, rtol=0, atol=0)


def test_an_optimiser_with_state_of_its_own_keeps_it():
    twins = Twins(lambda m: KINDS["adam"](groups([m.a, m.b])))
    twins.train(0, 1)
    old = twins.optimizer
    twins.replace(lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    twins.train(2)
    twins.training.setOptimizer(old)
    twins.training(rows(3))
    assert old.state[twins.model.a.weight]["step"] == 3
    assert twins.optimizer.state[twins.model.a.weight]["step"] == 3


def test_state_that_is_cleared_does_not_come_back():
    twins = Twins(lambda m: KINDS["adam"](groups([m.a, m.b])))
    twins.train(0, 1)
    twins.optimizer.state.clear()
    twins.training.setOptimizer(twins.optimizer)
    twins.training(rows(2))
    assert twins.optimizer.state[twins.model.a.weight]["step"] == 1


def test_a_fresh_start_uses_the_numbers_of_now():
    """The combined variant of SGD starts with a share of the weights."""

    def train(weight_decay, then=None):
        model = Chain()
        optimizer = o.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay, use_combined_accum=True)
        training = poptorch.trainingModel(model, poptorch.Options().engine("eager"), optimizer)
        if then is not None:
            training.compile(rows(0))
            optimizer.param_groups[0]["weight_decay"] = then
            optimizer.state.clear()
            training.setOptimizer(optimizer)
        training(rows(0))
        return model.state_dict()

    torch.testing.assert_close(train(0.5, then=0.1), train(0.1), rtol=0, atol=0)


# ---- compiling again


def test_random_numbers_go_on():
    class Dropping(Chain):
        def forward(self, x):
            y, _ = super().forward(nn.functional.dropout(x))
            return y, nn.functional.mse_loss(y, torch.ones_like(y))

    def run(*, leaves_out):
        model = Dropping()
        options = poptorch.Options().engine("eager").randomSeed(3)
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
        results = [training(rows(0))[0]]
        if leaves_out:
            training.setOptimizer(torch.optim.SGD(model.a.parameters(), lr=0.0))
        return [*results, training(rows(0))[0], training(rows(0))[0]]

    torch.testing.assert_close(run(leaves_out=True), run(leaves_out=False), rtol=0, atol=0)


def test_a_call_that_fails_leaves_the_next_one_right():
    class Picky(Chain):
        def forward(self, x, index):
            return super().forward(x[index])

    model = Picky()
    training = poptorch.trainingModel(
        model, poptorch.Options().engine("eager"), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    index = torch.zeros(4, dtype=torch.long)
    training(rows(0), index)
    kept = copy.deepcopy(model.b.state_dict())
    training.setOptimizer(torch.optim.SGD(model.a.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        training(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))
    with pytest.raises(poptorch.Error, match="leads to the index 9"):
        training(rows(0), index + 9)  # compiled again, but never run
    before = copy.deepcopy(model.a.state_dict())
    training(rows(0), index)
    torch.testing.assert_close(model.b.state_dict(), kept, rtol=0, atol=0)
    assert not torch.equal(model.a.weight, before["weight"])


def test_going_back_before_the_next_call_compiles_nothing():
    twins = Twins(lambda m: KINDS["sgd"](groups([m.a, m.b])))
    twins.train(0)
    program = twins.training._executable
    twins.training.setOptimizer(KINDS["sgd"](groups([twins.model.a])))
    twins.training.copyWeightsToDevice()
    twins.training.setOptimizer(twins.optimizer)
    twins.train(1)
    twins.check()
    assert twins.training._executable is program


def test_all_programs_of_a_model_are_compiled_again():
    options = poptorch.Options().engine("eager").allowShapeChanges()
    model = Chain()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    for count in (2, 4):
        training(rows(0)[:count])
    training.setOptimizer(torch.optim.SGD(model.a.parameters(), lr=0.1))
    kept = copy.deepcopy(model.b.state_dict())
    for count in (2, 4, 2):
        training(rows(0)[:count])
    torch.testing.assert_close(model.b.state_dict(), kept, rtol=0, atol=0)
    assert compilations(training) == 2


def test_programs_share_the_scale_of_the_loss():
    """Whatever the shapes, and also if one is compiled again."""
    options = poptorch.Options().engine("eager").allowShapeChanges()
    options.Training.setAutomaticLossScaling(True)
    options.anchorTensor("scale", "finalLossScale")
    model = Chain()
    training = poptorch.trainingModel(model, options, o.SGD(model.parameters(), lr=0.1))
    scales = []
    for step, count in enumerate((2, 4, 2, 4)):
        if step == 2:
            training.setOptimizer(o.SGD(model.a.parameters(), lr=0.1))
        training(rows(0)[:count])
        scales.append(training.getAnchoredTensor("scale").item())
    assert scales == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("kind", [o.SGD, o.Adam, o.LAMB])
def test_what_an_optimiser_shows_before_and_after(kind):
    model = Chain()
    training = poptorch.trainingModel(model, poptorch.Options().engine("eager"), kind(model.parameters(), lr=0.1))
    training(rows(0))
    new = kind(model.b.parameters(), lr=0.2)
    training.setOptimizer(new)
    for _ in range(2):
        found = new.state_dict()
        assert {name.rpartition("___")[2] for name in found["ipu_state"]} <= {"b.weight", "b.bias"}
        assert {name.rpartition("___")[2] for name in found["ipu_param"]} == {"b.weight", "b.bias", "lossScaling_FLOAT"}
        new.load_state_dict(copy.deepcopy(found))
        training(rows(1))


def test_complex_parameters_keep_the_types_of_their_state():
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model.forward = lambda x: poptorch.identity_loss((model.w * x).abs().sum(), reduction="none")
    optimizer = o.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, poptorch.Options().engine("eager"), optimizer)
    training(torch.ones(3))
    training.setOptimizer(optimizer)
    training(torch.ones(3))
