"""What the documents promise about optimisers; the numbers in the docstrings are those of the specification."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from optim.banks import Given, options

o = poptorch.optim
OURS = [o.SGD, o.Adam, o.AdamW, o.RMSprop, o.LAMB]
TORCHS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
NO_BIAS = [(o.LAMB, {"bias_correction": False}), (o.AdamW, {"bias_correction": False})]
VARIANTS = [*[(kind, {}) for kind in (*OURS, *TORCHS)], *NO_BIAS]
HYPERS = {
    o.SGD: {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    o.Adam: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    o.AdamW: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    o.RMSprop: {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
}


def name_of(value):
    kind, extra = value if isinstance(value, tuple) else (value, {})
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}{'-no-bias' if extra else ''}"


class Lin(nn.Module):
    """Model W of the specification."""

    def __init__(self, n: int = 10) -> None:
        super().__init__()
        self.lin = nn.Linear(n, n)

    def forward(self, x):
        y = F.log_softmax(self.lin(x.flatten()), dim=0)
        return y, poptorch.identity_loss(y**2, reduction="sum")


class Classifier(nn.Module):
    """Model L of the specification."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x, label):
        y = self.second(self.first(x))
        return y, F.cross_entropy(y, label)


def wrap(model, optimizer, made=None):
    return poptorch.trainingModel(model, made or options(), optimizer)


def small(kind, **settings):
    """A compiled model of one parameter and its optimiser."""
    model = Given()
    optimizer = kind(model.parameters(), **settings)
    return wrap(model, optimizer), optimizer


ROW = torch.ones(1, 3)


# ---- training


@pytest.mark.parametrize(("kind", "extra"), VARIANTS, ids=map(name_of, VARIANTS))
def test_nothing_moves_without_a_learning_rate_until_it_is_set(kind, extra):
    """1, 2, 3, 5: lr 0 keeps the loss; a new lr counts after setOptimizer, not before, and then the model learns."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = kind(model.parameters(), lr=0.0, **extra)
    training = wrap(model, optimizer)
    batch = torch.randn(1, 10), torch.tensor([3])
    losses = [training(*batch)[1].item() for _ in range(3)]
    optimizer.param_groups[0]["lr"] = 0.01
    losses += [training(*batch)[1].item() for _ in range(2)]
    assert len(set(losses)) == 1
    training.setOptimizer(optimizer)
    for _ in range(300):
        out, loss = training(*batch)
        if loss < 0.03:
            break
    assert loss < 0.03
    assert out.argmax() == 3


@pytest.mark.parametrize(("kind", "extra"), VARIANTS, ids=map(name_of, VARIANTS))
def test_ten_steps_equal_the_step_of_the_host(kind, extra):
    """4, 5, 6: after every step the parameters are those that the optimiser's own step() gives."""
    torch.manual_seed(0)
    model = Lin()
    twin = copy.deepcopy(model)
    training = wrap(model, kind(model.parameters(), lr=0.01, **extra))
    reference = kind(twin.parameters(), lr=0.01, **extra)
    x = torch.randn(10)
    for _ in range(10):
        _, loss = training(x)
        reference.zero_grad()
        expected = (F.log_softmax(twin.lin(x), dim=0) ** 2).sum()
        expected.backward()
        reference.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.parametrize("limit", [100.0, None])
def test_lamb_learns_with_and_without_a_weight_limit(limit):
    """7, 8."""
    torch.manual_seed(0)
    model = Classifier()
    training = wrap(model, o.LAMB(model.parameters(), lr=0.01, max_weight_norm=limit))
    batch = torch.randn(1, 10), torch.tensor([3])
    losses = [training(*batch)[1].item() for _ in range(200)]
    assert losses[-1] < 0.03


def test_variants_of_rmsprop():
    """9, 10: without the flag and with False it is the same, with True it is not."""
    ends = []
    for flag in (None, False, True):
        model = Given()
        training = wrap(model, o.RMSprop(model.parameters(), lr=0.02, use_tf_variant=flag))
        for _ in range(5):
            training(ROW)
        ends.append(model.w.detach())
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


def test_nesterov_of_torch_runs():
    """11."""
    training, _ = small(torch.optim.SGD, nesterov=True, momentum=0.1, lr=0.001)
    training(ROW)


@pytest.mark.parametrize("sums", [False, True])
def test_many_accumulated_gradients_learn(sums):
    """12."""
    torch.manual_seed(0)
    model = Classifier()
    training = wrap(model, o.SGD(model.parameters(), lr=0.05), options(accumulation=20, sums=sums))
    batch = torch.randn(1, 10).expand(20, 10), torch.full((20,), 3)
    losses = [training(*batch)[1].item() for _ in range(60)]
    assert losses[-1] < 0.03


@pytest.mark.parametrize(("sums", "lr"), [(False, 0.01), (True, 0.02)])
def test_accumulation_equals_one_larger_batch(sums, lr):
    """13, 14: A=2 with lr 0.01 is A=1 with the same lr for Mean, and with twice the lr for Sum."""

    class L1(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(10, 10)

        def forward(self, x, target):
            y = self.fc(x)
            return y, F.l1_loss(y, target)

    ends = []
    for accumulation, rate in ((1, lr), (2, 0.01)):
        model = L1()
        training = wrap(model, o.SGD(model.parameters(), lr=rate), options(accumulation=accumulation, sums=sums))
        generator = torch.Generator().manual_seed(5)
        for _ in range(10):
            training(torch.randn(4, 10, generator=generator), torch.randn(4, 10, generator=generator))
        ends.append(dict(model.named_parameters()))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize(
    ("kind", "twin"), [(o.SGD, torch.optim.SGD), (o.Adam, torch.optim.Adam), (o.AdamW, torch.optim.AdamW)]
)
def test_max_grad_norm_is_clip_grad_norm(kind, twin):
    """15."""
    model = Given()
    reference = copy.deepcopy(model)
    training = wrap(model, kind(model.parameters(), lr=0.01, max_grad_norm=0.001))
    optimizer = twin(reference.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        rows = torch.randn(1, 3, generator=generator)
        training(rows)
        reference.w.grad = rows[0].clone()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.001)
        optimizer.step()
    torch.testing.assert_close(model.w, reference.w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_max_grad_norm_limits_the_accumulated_gradient(replicas):
    """16, without the pipeline: what is limited is the reduced gradient, not that of each micro-batch."""
    model = Given()
    before = model.w.detach().clone()
    optimizer = o.SGD(model.parameters(), lr=1.0, max_grad_norm=0.001)
    rows = torch.randn(3 * replicas, 3, generator=torch.Generator().manual_seed(5))
    wrap(model, optimizer, options(accumulation=3, replicas=replicas))(rows)
    mean = rows.mean(0)
    torch.testing.assert_close(before - model.w.detach(), 0.001 * mean / mean.norm(), rtol=1e-3, atol=1e-6)


def test_without_an_optimiser_sgd_trains():
    """17."""
    model = Given([1.0])
    training = poptorch.trainingModel(model, options())
    training(torch.ones(1, 1))
    assert isinstance(training._optimizers.optimizers[0], o.SGD)
    assert model.w.item() == pytest.approx(0.99)


@pytest.mark.parametrize("only_last", [False, True])
def test_frozen_parameters_stay(only_last):
    """18, 19."""
    model = Classifier()
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trained = model.second.parameters() if only_last else model.parameters()
    training = wrap(model, o.SGD(trained, lr=0.1))
    for _ in range(3):
        training(torch.randn(1, 10), torch.tensor([3]))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"second.weight", "second.bias"}


def test_float16_input_and_float32_weights_learn():
    """95, with fewer steps: the loss keeps falling."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x, target):
            return F.mse_loss(self.fc(x.float()), target.float())

    torch.manual_seed(0)
    training = poptorch.trainingModel(Half(), options())
    batch = torch.randn(4, 4).half(), torch.randn(4, 1).half()
    losses = [training(*batch).item() for _ in range(300)]
    assert losses[-1] < 0.5 * losses[0]


# ---- accumulation types and strategies


def test_accumulation_type_is_checked():
    """22, and the check when it is changed afterwards."""
    parameters = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(AssertionError, match=r"accum_type is torch.bfloat16"):
        o.Adam(parameters, accum_type=torch.bfloat16)
    model = Given()
    optimizer = o.Adam(model.parameters())
    optimizer.accum_type = torch.bfloat16
    with pytest.raises(ValueError, match="accum_type"):
        wrap(model, optimizer)


def test_combined_sgd_and_its_copy():
    """23, 24."""
    training, optimizer = small(
        o.SGD, lr=0.1, momentum=0.5, use_combined_accum=True, velocity_scaling=128.1, loss_scaling=0.05
    )
    training(ROW)
    training.setOptimizer(copy.copy(optimizer))
    training(ROW)


def test_velocity_scaling_belongs_to_the_combined_variant(caplog):
    """25, 26."""
    separate = o.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, velocity_scaling=2.0)
    assert "velocity_scaling" not in separate.param_groups[0]
    assert "velocity_scaling=2.0 is ignored" in caplog.text
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    combined = o.SGD(groups, lr=0.1, use_combined_accum=True, velocity_scaling=2.0)
    assert [group["velocity_scaling"] for group in combined.param_groups] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({"accum_type": torch.float16}, "Running"),
        ({"accum_type": torch.float32}, "Post"),
        ({}, "Post"),
        ({"accum_type": torch.float16, "use_combined_accum": True}, "Post"),
    ],
)
def test_float16_accumulators_take_a_running_mean(settings, strategy):
    """28-30, 33: also if the options are frozen, and the user's own options stay as they are."""
    made = options(accumulation=2)
    made._freeze()
    model = Given()
    training = wrap(model, o.SGD(model.parameters(), lr=0.1, **settings), made)
    training(torch.ones(2, 3))
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy.name == strategy
    assert made.Training.meanAccumulationAndReplicationReductionStrategy.name == "Post"


def test_strategy_of_inference_and_a_chosen_one():
    """31, 32."""
    inference = poptorch.inferenceModel(Given(), options())
    assert inference.options.Training.meanAccumulationAndReplicationReductionStrategy.name == "Post"
    made = options()
    made.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
    model = Given()
    training = wrap(model, o.SGD(model.parameters(), lr=0.1), made)
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy.name == "Running"


def test_the_deprecated_strategy_is_refused_when_compiling():
    made = options(accumulation=2)
    made.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.PostAndLoss)
    model = Given()
    with pytest.raises(poptorch.Error, match="out of range"):
        wrap(model, o.SGD(model.parameters(), lr=0.1), made)(torch.ones(2, 3))


def test_accumulation_type_after_compiling():
    """34, 35."""
    training, optimizer = small(o.Adam, lr=0.1)
    training(ROW)
    optimizer.accum_type = torch.half
    with pytest.raises(ValueError, match="is already compiled"):
        training.setOptimizer(optimizer)
    training, optimizer = small(o.Adam, lr=0.1, accum_type=torch.half)
    training(ROW)
    optimizer.param_groups[0]["lr"] = 0.2
    training.setOptimizer(optimizer)
    training(ROW)


# ---- constant and variable


def test_what_was_given_is_variable():
    """36-40."""
    parameters = [nn.Parameter(torch.zeros(1))]
    plain = o.SGD(parameters, lr=0.01).variable_attrs
    assert plain.isConstant("momentum")
    assert not plain.isConstant("lr")
    assert plain.isConstant("loss_scaling")
    plain.markAsVariable("loss_scaling")
    assert not plain.isConstant("loss_scaling")
    assert "momentum" in plain._allowed_attributes  # read by programs
    given = o.SGD(parameters, lr=0.01, momentum=0.0, loss_scaling=2.0).variable_attrs
    assert not given.isConstant("momentum")
    assert not given.isConstant("loss_scaling")
    given.markAsConstant("loss_scaling")
    assert given.isConstant("loss_scaling")
    assert given.isConstant("never heard of")
    with pytest.raises(AssertionError, match="Unknown attribute 'foo'"):
        given.markAsConstant("foo")


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("is_given", [True, False])
def test_loss_scaling_may_change_if_it_is_variable(kind, is_given):
    """41, 42."""
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1, **({"loss_scaling": 1.0} if is_given else {}))
    if not is_given:
        optimizer.variable_attrs.markAsVariable("loss_scaling")
    training = wrap(model, optimizer)
    training(ROW)
    optimizer.loss_scaling = 2.0
    training.setOptimizer(optimizer)
    training(ROW)


@pytest.mark.parametrize("kind", HYPERS)
def test_twins_describe_the_same_optimiser(kind, caplog):
    """43-46, 49: usual numbers of torch, only lr, and numbers marked as constant are one and the same."""
    twin = kind.__bases__[1]
    assert twin.__module__.startswith("torch.optim")
    model = Given()
    training = wrap(model, twin(model.parameters(), lr=0.1, **HYPERS[kind]))
    training(ROW)
    marked = kind(model.parameters(), lr=0.1, **HYPERS[kind])
    for name in HYPERS[kind]:
        marked.variable_attrs.markAsConstant(name)
    with caplog.at_level("DEBUG", logger="poptorch::python"):
        for same in (twin(model.parameters(), lr=0.1), kind(model.parameters(), lr=0.1), marked):
            training.setOptimizer(same)
        assert "Updating" not in caplog.text
        training.setOptimizer(kind(model.parameters(), lr=0.2))
    assert "Updating group 0 optimizer with" in caplog.text


@pytest.mark.parametrize("kind", HYPERS)
@pytest.mark.parametrize("is_marked", [False, True])
def test_variable_numbers_can_all_change(kind, is_marked):
    """47, 48; nothing is compiled again."""

    def changed(value):
        return tuple(v / 2 for v in value) if isinstance(value, tuple) else value + 0.5

    model = Given()
    first = kind(model.parameters(), lr=0.1, **({} if is_marked else HYPERS[kind]))
    if is_marked:
        for name in HYPERS[kind]:
            first.variable_attrs.markAsVariable(name)
    training = wrap(model, first)
    training(ROW)
    program = training._executable
    training.setOptimizer(
        kind(model.parameters(), lr=0.6, **{name: changed(value) for name, value in HYPERS[kind].items()})
    )
    training(ROW)
    assert training._executable is program


def test_amsgrad_is_refused_for_poptorchs_adam():
    """50; torch's own classes have it."""
    model = Given()
    with pytest.raises(ValueError, match="Only non-amsgrad Adam/AdamW optimizers are supported"):
        wrap(model, o.Adam(model.parameters(), amsgrad=True))


@pytest.mark.parametrize(
    ("kind", "before", "after", "text"),
    [
        (o.Adam, {}, {"lr": 0.5}, "non constant value: lr of parameter group 0"),
        (o.Adam, {"lr": 0.1}, {"lr": 0.1, "eps": 1e-3}, "Can not replace a constant value with a non constant value"),
        (o.SGD, {"lr": 0.1}, {"lr": 0.1, "max_grad_norm": 1.0}, "max_grad_norm"),
        (o.SGD, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, "rule"),
        (o.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}, "kind"),
        (o.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "velocity_accum_type": torch.half}, "types"),
        (o.Adam, {"lr": 0.1, "accum_type": torch.half}, {"lr": 0.1}, "accum_type cannot change"),
        (o.RMSprop, {"lr": 0.1}, {"lr": 0.1, "centered": True}, "kind"),
        (o.LAMB, {"lr": 0.1}, {"lr": 0.1, "bias_correction": False}, "kind"),
    ],
)
def test_what_a_replacement_may_not_change(kind, before, after, text):
    """90, 91, 92."""
    training, _ = small(kind, **before)
    training(ROW)
    with pytest.raises(poptorch.Error, match=text):
        training.setOptimizer(kind(training.model.parameters(), **after))


@pytest.mark.parametrize(("kind", "other"), [(o.SGD, o.Adam), (o.Adam, o.AdamW), (o.AdamW, torch.optim.RMSprop)])
def test_the_class_may_not_change(kind, other):
    """90."""
    training, _ = small(kind, lr=0.1)
    training(ROW)
    with pytest.raises(poptorch.Error, match="kind of optimiser cannot change"):
        training.setOptimizer(other(training.model.parameters(), lr=0.1))


def test_a_constant_that_changed():
    """92: without lr in the constructor, lr is a constant."""
    training, optimizer = small(o.Adam)
    training(ROW)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(poptorch.Error, match="Values are constant but do not match"):
        training.setOptimizer(optimizer)


@pytest.mark.parametrize(
    ("settings", "change", "error", "text"),
    [
        ({"lr": 0.1}, {"lr": torch.tensor(0.1)}, AssertionError, "lr of parameter group 0 is tensor"),
        ({"lr": 0.1}, {"betas": [0.9, 0.99]}, AssertionError, "betas of parameter group 0"),
        ({"lr": 0.1}, {"lr": -1.0}, poptorch.Error, "cannot be negative"),
        ({"lr": 0.1, "max_grad_norm": float("nan")}, {}, poptorch.Error, "max_grad_norm is nan"),
        (
            {"lr": 0.1, "loss_scaling": 0.0},
            {},
            poptorch.Error,
            "loss_scaling of the optimiser is 0, and must be positive",
        ),
    ],
)
def test_values_that_are_refused(settings, change, error, text):
    model = Given()
    optimizer = o.Adam(model.parameters(), **settings)
    optimizer.param_groups[0].update(change)
    with pytest.raises(error, match=text):
        wrap(model, optimizer)


def test_groups_of_rmsprop_must_agree_on_centered():
    model = Classifier()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "centered": True}]
    with pytest.raises(AssertionError, match="centered"):
        wrap(model, o.RMSprop(groups, lr=0.1))


def test_a_constant_learning_rate_of_zero_is_refused():
    model = Given()
    optimizer = o.SGD(model.parameters(), lr=0.0)
    optimizer.variable_attrs.markAsConstant("lr")
    with pytest.raises(poptorch.Error, match="constant zero"):
        wrap(model, optimizer)


# ---- groups


@pytest.mark.parametrize("kind", [torch.optim.SGD, o.SGD])
def test_groups_have_their_own_learning_rate(kind):
    """51-53."""

    def make(first, second):
        groups = [
            {"params": model.first.parameters(), "lr": first},
            {"params": model.second.parameters(), "lr": second},
        ]
        return kind(groups, lr=1.0)

    torch.manual_seed(0)
    model = Classifier()
    training = wrap(model, make(0.0, 0.0))
    batch = torch.randn(1, 10), torch.tensor([3])

    def changed(runs):
        before = copy.deepcopy(model.state_dict())
        for _ in range(runs):
            training(*batch)
        return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}

    assert changed(3) == set()
    training.setOptimizer(make(0.1, 0.0))
    assert changed(3) == {"first.weight", "first.bias"}
    training.setOptimizer(make(0.1, 0.1))
    assert len(changed(100)) == 4
    assert training(*batch)[0].argmax() == 3


def test_group_values_win_over_defaults():
    """54."""
    model = Classifier()
    before = copy.deepcopy(model.state_dict())
    groups = [{"params": list(part.parameters()), "lr": 0.0} for part in (model.first, model.second)]
    training = wrap(model, torch.optim.AdamW(groups, lr=0.1))
    training(torch.randn(1, 10), torch.tensor([3]))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def log_of(caplog, action):
    caplog.clear()
    with caplog.at_level("DEBUG", logger="poptorch::python"):
        action()
    return [text for record in caplog.records if (text := record.getMessage()).startswith("Updating")]


def two_groups(**settings):
    model = Classifier()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
    return model, o.SGD(groups, lr=0.1, **settings)


def test_velocity_scaling_in_the_log(caplog):
    """27, 55, 56, 59."""
    model, optimizer = two_groups(loss_scaling=2.0, velocity_scaling=2.0, use_combined_accum=True)
    made: list[poptorch.PoplarExecutor] = []
    lines = log_of(caplog, lambda: made.append(wrap(model, optimizer)))
    (training,) = made
    assert "defaultVelocityScaling=2, lossScaling=2" in lines[0]
    assert ["velocityScaling=2 for" in line for line in lines[1:3]] == [True, True]
    assert "['second.weight', 'second.bias']" in lines[2]
    optimizer.param_groups[1]["velocity_scaling"] = 4.0
    lines = log_of(caplog, lambda: training.setOptimizer(optimizer))
    assert [line[:16] for line in lines] == ["Updating group 1"]
    assert "velocityScaling=4 for" in lines[0]
    optimizer.loss_scaling = 4.0
    lines = log_of(caplog, lambda: training.setOptimizer(optimizer))
    assert [line[:14] for line in lines] == ["Updating graph"]
    assert "defaultVelocityScaling=2, lossScaling=4" in lines[0]
    model, optimizer = two_groups(loss_scaling=2.0)
    lines = log_of(caplog, lambda: made.append(wrap(model, optimizer)))
    assert "SGD2" in lines[0]
    assert ["elocityScaling=2" in line for line in lines] == [True, True, True]
    optimizer.loss_scaling = 4.0
    optimizer.defaults["lr"] = 0.7
    lines = log_of(caplog, lambda: made[1].setOptimizer(optimizer))
    assert ["elocityScaling=4" in line for line in lines] == [True, True, True]
    assert "defaultLearningRate=0.7" in lines[0]
    assert "learningRate=0.1," in lines[1]
    optimizer.loss_scaling = 1.0
    lines = log_of(caplog, lambda: made[1].setOptimizer(optimizer))
    assert ["elocityScaling=1" in line for line in lines] == [True, True, True]


def test_attributes_that_nobody_reads_are_reported_once(caplog):
    """57, 58, 60, 61, 63."""
    model, optimizer = two_groups()
    optimizer.param_groups[0]["step"] = 1  # there before the first use: never reported
    training = wrap(model, optimizer)
    optimizer.param_groups[0]["loss_scaling"] = 4.0
    optimizer.param_groups[1]["velocity_scaling"] = 4.0
    optimizer.lr = 0.5
    caplog.clear()
    training.setOptimizer(optimizer)
    training.setOptimizer(optimizer)
    assert sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING") == [
        "Ignoring unexpected group 0 attribute: loss_scaling",
        "Ignoring unexpected group 1 attribute: velocity_scaling",
        "Ignoring unexpected optimizer attribute: lr",
    ]


def test_a_known_group_key_is_still_new_as_an_attribute(caplog):
    """63: LR schedulers that are built before wrapping cause no report."""
    model, optimizer = two_groups()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    training = wrap(model, optimizer)
    caplog.clear()
    training.setOptimizer(optimizer)
    assert not caplog.records
    optimizer.initial_lr = 0.1
    training.setOptimizer(optimizer)
    assert [record.getMessage() for record in caplog.records] == ["Ignoring unexpected optimizer attribute: initial_lr"]


def test_reports_can_be_silenced(caplog):
    """62."""
    model, optimizer = two_groups()
    training = wrap(model, optimizer, options().relaxOptimizerAttributesChecks())
    optimizer.param_groups[0]["initial_lr"] = optimizer.initial_lr = 0.1
    caplog.clear()
    training.setOptimizer(optimizer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# ---- state


@pytest.mark.parametrize("kind", OURS)
def test_ipu_entries_of_the_state_dictionary(kind):
    """64-69 and 104 of the executor: empty before compiling, then what the program uses, then different."""
    model = Lin()
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.025, loss_scaling=0.75)
    training = wrap(model, optimizer)
    before = optimizer.state_dict()
    assert before["ipu_state"] is None
    assert before["ipu_param"] is None
    training.compile(torch.randn(10))
    compiled = copy.deepcopy(optimizer.state_dict())
    numbers = {name: value.item() for name, value in compiled["ipu_param"].items()}
    assert numbers["lossScaling_FLOAT"] == pytest.approx(0.75)
    if kind is o.SGD:
        assert compiled["ipu_state"] == {}
        assert numbers["weightDecayScaleFactor0___specific___lin.bias"] == pytest.approx(1 - 0.05 * 0.025)
        assert numbers["scaledLearningRate0___specific___lin.weight"] == pytest.approx(0.05 / 0.75)
        return
    assert numbers["learningRate___specific___lin.bias"] == pytest.approx(0.05)
    assert numbers["weightDecay___specific___lin.bias"] == pytest.approx(0.025)
    assert {"Accl1___lin.weight", "Accl1___lin.bias"} <= set(compiled["ipu_state"])
    training(torch.randn(10))
    after = optimizer.state_dict()["ipu_state"]
    assert any(not torch.equal(after[name], value) for name, value in compiled["ipu_state"].items())


@pytest.mark.parametrize("kind", OURS)
def test_an_offline_model_shows_no_state(kind):
    """71."""
    model = Given()
    optimizer = kind(model.parameters(), lr=0.1)
    training = wrap(model, optimizer, options().useOfflineIpuTarget())
    training.compile(ROW)
    training.setOptimizer(optimizer)
    saved = optimizer.state_dict()
    assert (saved["ipu_state"], saved["ipu_param"]) == (None, None)


def test_every_group_of_replicas_has_its_own_state():
    """83: each tensor of the state has the groups as its first dimension, and goes back where it came from."""
    model = Given()
    model.w = nn.Parameter(torch.randn(4, 3))
    optimizer = o.AdamW(model.parameters(), lr=0.1)
    training = wrap(model, optimizer, options(replicas=4))
    training.w.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup)
    training(torch.randn(4, 3))
    state = copy.deepcopy(optimizer.state_dict()["ipu_state"])
    assert {name: tensor.shape for name, tensor in state.items()} == {
        "Accl1___w": (4, 3),
        "Accl2___w": (4, 3),
        "Step___w": (4,),
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "ipu_state": {**state, "Step___w": torch.full((4,), 7.0)}})
    training(torch.randn(4, 3))
    assert optimizer.state_dict()["ipu_state"]["Step___w"].tolist() == [8.0] * 4


def test_a_dictionary_that_was_read_stays_as_it_was():
    """69, 70, 82: `ipu_state` is what the state was when it was read; torch's `state` shows the tensors themselves."""
    training, optimizer = small(o.Adam, lr=0.1)
    training(ROW)
    first, second = optimizer.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(first["ipu_state"], second["ipu_state"], rtol=0, atol=0)
    before = copy.deepcopy(first["ipu_state"])
    training(ROW)
    torch.testing.assert_close(first["ipu_state"], before, rtol=0, atol=0)
    assert not torch.equal(optimizer.state_dict()["ipu_state"]["Accl1___w"], before["Accl1___w"])
    assert first["state"][0]["exp_avg"] is optimizer.state[training.model.w]["exp_avg"]


def test_detaching_keeps_the_state_readable():
    """72, 73."""
    training, optimizer = small(o.Adam, lr=0.1)
    training(ROW)
    training.detachFromDevice()
    assert optimizer.state_dict()["ipu_state"]["Step___w"] == 1
    saved = copy.deepcopy(optimizer.state_dict())
    saved["ipu_state"]["Step___w"].fill_(5)
    optimizer.load_state_dict(saved)
    training.attachToDevice()
    training(ROW)
    assert optimizer.state_dict()["ipu_state"]["Step___w"] == 6


def test_loaded_ipu_state_is_used(caplog):
    """74-76: values under IPU names reach the state; a missing one keeps its value, with a warning."""
    training, optimizer = small(o.Adam, lr=0.1)
    training(ROW)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["ipu_state"]["Accl1___w"] = torch.rand(3)
    del saved["ipu_state"]["Accl2___w"]
    optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert torch.equal(now["ipu_state"]["Accl1___w"], saved["ipu_state"]["Accl1___w"])
    assert torch.equal(now["state"][0]["exp_avg"], saved["ipu_state"]["Accl1___w"])
    assert "lacks Accl2___w" in caplog.text
    training(ROW)
    expected = 0.9 * saved["ipu_state"]["Accl1___w"] + 0.1
    torch.testing.assert_close(optimizer.state_dict()["ipu_state"]["Accl1___w"], expected)


def test_dictionaries_that_cannot_be_loaded():
    """77: only what is no state of an optimiser at all; one of torch's twin is welcome here."""
    _, optimizer = small(o.Adam, lr=0.1)
    for wrong in ({}, {"state": {}}):
        with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded onto the IPU"):
            optimizer.load_state_dict(wrong)


CAPTURED = ["Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adafactor"]
CHECKPOINTED = [
    *[(kind, {"momentum": 0.9} if issubclass(kind, torch.optim.SGD) else {}) for kind in (*OURS, *TORCHS)],
    (o.SGD, {"momentum": 0.9, "weight_decay": 0.1, "use_combined_accum": True, "velocity_scaling": 4.0}),
    *[(getattr(torch.optim, name), {}) for name in CAPTURED],
]


@pytest.mark.parametrize(("kind", "extra"), CHECKPOINTED)
def test_training_goes_on_bit_by_bit_after_a_checkpoint(kind, extra):
    """78, 79: through torch.save, destroy, and new objects."""

    def rows(seed):
        return torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))

    training, optimizer = small(kind, lr=0.1, **extra)
    for seed in range(3):
        training(rows(seed))
    file = io.BytesIO()
    torch.save({"o": optimizer.state_dict(), "m": training.model.state_dict()}, file)
    for seed in range(3, 6):
        training(rows(seed))
    training.destroy()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = Given()
    model.load_state_dict(saved["m"])
    again = kind(model.parameters(), lr=0.5, **extra)
    again.load_state_dict(saved["o"])
    second = wrap(model, again)
    second.compile(rows(0))
    if "ipu_state" in saved["o"]:
        torch.testing.assert_close(again.state_dict()["ipu_state"], saved["o"]["ipu_state"], rtol=0, atol=0)
    for seed in range(3, 6):
        second(rows(seed))
    assert torch.equal(model.w, training.model.w)


def test_float32_moments_of_float16_parameters_survive_a_checkpoint():
    model = Given(dtype=torch.float16)
    optimizer = o.Adam(model.parameters(), lr=0.1)
    wrap(model, optimizer)(torch.full((1, 3), 0.3, dtype=torch.float16))
    saved = copy.deepcopy(optimizer.state_dict())
    again = o.Adam(model.parameters(), lr=0.1)
    again.load_state_dict(saved)
    assert torch.equal(again.state[model.w]["exp_avg_sq"], saved["state"][0]["exp_avg_sq"])


@pytest.mark.parametrize("ours", HYPERS)
def test_state_moves_between_twins(ours):
    """Between poptorch.optim.X and torch.optim.X, both ways."""
    twin = ours.__bases__[1]
    settings = {"momentum": 0.9} if ours is o.SGD else {}
    training, optimizer = small(ours, lr=0.1, **settings)
    training(ROW)
    parameter = nn.Parameter(training.model.w.detach().clone())
    plain = twin([parameter], lr=0.5, **settings)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert plain.param_groups[0]["lr"] == 0.1
    parameter.grad = ROW[0].clone()
    plain.step()
    training(ROW)
    torch.testing.assert_close(parameter, training.model.w)
    back = ours(training.model.parameters(), lr=0.3, **settings)
    back.load_state_dict(copy.deepcopy(plain.state_dict()))
    training.setOptimizer(back)
    parameter.grad = ROW[0].clone()
    plain.step()
    training(ROW)
    torch.testing.assert_close(parameter, training.model.w)


def test_scheduled_learning_rate_is_loaded():
    """80, 81 and 105 of the executor."""
    training, optimizer = small(o.Adam, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    training(ROW)
    scheduler.step()
    training.setOptimizer(optimizer)
    assert optimizer.state_dict()["ipu_param"]["learningRate___specific___w"] == 0.5
    saved = copy.deepcopy(optimizer.state_dict())
    second, fresh = small(o.Adam, lr=0.1)
    second(ROW)
    fresh.load_state_dict(saved)
    assert fresh.ipu_state_is_dirty
    second(ROW)
    assert not fresh.ipu_state_is_dirty
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.state_dict()["ipu_param"]["learningRate___specific___w"] == 0.5


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: torch.load(_pickled(x), weights_only=False)])
def test_copies_keep_everything(kind, duplicate):
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1, loss_scaling=4.0, accum_type=torch.float16)
    twin = duplicate(optimizer)
    assert twin.loss_scaling == 4.0
    assert twin.accum_type == torch.float16
    assert not twin.variable_attrs.isConstant("loss_scaling")
    assert not twin.ipu_state_is_dirty
    assert not twin.host_state_is_dirty
    assert {name: getattr(twin, name) for name in kind.OWN} == {name: getattr(optimizer, name) for name in kind.OWN}


def _pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_replaced_optimiser_keeps_what_it_had():
    training, old = small(o.Adam, lr=0.1)
    training(ROW)
    before = old.state[training.model.w]["exp_avg"].clone()
    new = o.Adam(training.model.parameters(), lr=0.2)
    training.setOptimizer(new)
    training(ROW)
    assert torch.equal(old.state_dict()["ipu_state"]["Accl1___w"], before)
    assert new.state[training.model.w]["step"] == 2


# ---- the rest


@pytest.mark.parametrize("kind", [*OURS, *TORCHS], ids=name_of)
def test_a_subclass_warns_and_its_parent_does_not(kind, caplog):
    """85."""
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
    """88."""
    training, _ = small(torch.optim.SGD, lr=0.1)
    training(ROW)
    training.setOptimizer(torch.optim.SGD(training.model.parameters(), lr=0.001))
    before = training.model.w.detach().clone()
    training(ROW)
    torch.testing.assert_close(training.model.w.detach(), before - 0.001)


def test_outputs_refuse_backward():
    """89."""
    training, _ = small(o.SGD, lr=0.1)
    with pytest.raises(poptorch.Error, match="backward"):
        training(ROW).backward()


@pytest.mark.parametrize(("iterations", "accumulation"), [(1, 1), (1, 3), (3, 1), (3, 5), (5, 3)])
def test_buffers_follow_micro_batches_and_weights_follow_updates(iterations, accumulation):
    """94."""

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
