"""The state of an optimiser: read, saved, loaded, copied."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import poptorch
from optim.banks import Given, options
from optim.kinds import HYPERS, OURS, ROW, TORCHS, Lin, o, small, wrap


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
    # statement 71
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
    # statements 72, 73
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
