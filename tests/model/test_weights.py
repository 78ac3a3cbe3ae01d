"""Weights and buffers between the host and a program."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from model.executors import assert_same, batch, infer, sgd, snapshot, train
from models import Regression, Scale


def test_state_dict_is_plain_and_current():
    model = Regression()
    optimizer = sgd(model, momentum=0.9)
    before = snapshot(model)
    training = train(model, optimizer)
    training(*batch())
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert not torch.equal(state["fc.weight"], before[0]["fc.weight"])
    assert type(model.fc.weight) is nn.Parameter
    assert torch.equal(
        optimizer.state[model.fc.weight]["momentum_buffer"],
        torch.clone(optimizer.state_dict()["state"][0]["momentum_buffer"]),
    )


def test_training_goes_on_in_plain_pytorch():
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    training = train(model, optimizer)
    for seed in range(6):
        x, target = batch(seed=seed)
        reference_optimizer.zero_grad()
        reference(x, target)[1].backward()
        reference_optimizer.step()
        if seed < 3:
            training(x, target)
        else:
            if seed == 3:
                training.destroy()
            optimizer.zero_grad()
            model(x, target)[1].backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), reference_optimizer.state_dict())


def test_training_starts_from_a_checkpoint_of_plain_pytorch():
    torch.manual_seed(0)
    reference = Regression()
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)

    def step(seed):
        reference_optimizer.zero_grad()
        reference(*batch(seed=seed))[1].backward()
        reference_optimizer.step()

    step(0)
    model = Regression()
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))
    train(model, optimizer)(*batch(seed=1))
    step(1)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), reference_optimizer.state_dict())


def test_a_checkpoint_can_be_loaded_between_calls():
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = train(model, optimizer)
    training(*batch())
    kept = snapshot(model, optimizer)
    training(*batch(seed=1))
    expected = snapshot(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    training(*batch(seed=1))
    torch.testing.assert_close(snapshot(model, optimizer), expected)


def test_replaced_weights_are_used_by_the_next_training_call():
    model = Regression()
    training = train(model, sgd(model, lr=0.0))
    x, target = batch()
    training(x, target)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.data = torch.ones(2)
        model.fc.weight.data = torch.full((2, 3), 2.0)
    training.copyWeightsToDevice()
    torch.testing.assert_close(training(x, target)[0], x.sum(1, keepdim=True).expand(-1, 2) * 2 + 1)


def test_parameter_data_replaced_without_a_copy_call_is_noticed():
    model = Regression()
    training = train(model, sgd(model, lr=0.0))
    x, target = batch()
    training(x, target)
    model.fc.weight.data = torch.zeros(2, 3)
    torch.testing.assert_close(training(x, target)[0], model.fc.bias.detach().expand(4, 2))


def test_inference_sees_trained_weights_without_a_copy():
    model = Regression()
    x, target = batch()
    inference = infer(model)
    training = train(model)
    for _ in range(3):
        training(x, target)
        with torch.no_grad():
            torch.testing.assert_close(inference(x, target)[0], model(x, target)[0])


@pytest.mark.parametrize("source", ["model", "executor"])
def test_inference_made_after_training_sees_its_weights(source):
    model = Regression()
    training = train(model)
    x, target = batch()
    training(x, target)
    inference = infer(model if source == "model" else training)
    with torch.no_grad():
        torch.testing.assert_close(inference(x, target)[0], model(x, target)[0])
    training.destroy()
    inference(x, target)


def test_inference_keeps_its_weights_when_the_host_changes_them_and_warns_once(caplog):
    model = Scale(2.0)
    inference = infer(model)
    x = torch.tensor([1.0])
    assert inference(x).item() == 2
    with torch.no_grad():
        model.factor.fill_(5.0)
    assert inference(x).item() == 2
    assert inference(x).item() == 2
    assert sum("copyWeightsToDevice" in record.message for record in caplog.records) == 1
    inference.copyWeightsToDevice()
    assert inference(x).item() == 5


def test_host_change_by_replacing_data_warns_too(caplog):
    model = Scale(2.0)
    inference = infer(model)
    x = torch.tensor([1.0])
    inference(x)
    model.factor.data = torch.tensor([5.0])
    assert inference(x).item() == 2
    assert "copyWeightsToDevice" in caplog.text


def test_reattaching_picks_up_host_changes():
    model = Scale(2.0)
    inference = infer(model)
    x = torch.tensor([1.0])
    inference(x)
    inference.detachFromDevice()
    with torch.no_grad():
        model.factor.fill_(5.0)
    assert inference(x).item() == 5


@pytest.mark.parametrize("wrap", [train, infer])
def test_load_state_dict_is_used_at_once_and_returns_what_torch_returns(wrap):
    model = Regression()
    executor = wrap(model)
    x, target = batch()
    executor(x, target)
    other = Regression()
    result = executor.load_state_dict(other.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    with torch.no_grad():
        torch.testing.assert_close(executor(x, target)[0], other(x, target)[0])
    result = executor.load_state_dict({"fc.weight": torch.zeros(2, 3)}, strict=False)
    assert result.missing_keys == ["fc.bias"]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor([1.0]))

    def forward(self):
        self.count += 1
        return self.count


def test_buffers_of_an_inference_model_persist_and_reach_the_host_on_request():
    model = Counter()
    inference = infer(model)
    assert [inference().item() for _ in range(4)] == [2, 3, 4, 5]
    assert model.count.item() == 1
    inference.copyWeightsToHost()
    assert model.count.item() == 5


def test_batch_norm_statistics_follow_every_micro_batch():
    torch.manual_seed(0)

    class Normed(Regression):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, target):
            return super().forward(self.norm(x), target)

    model = Normed()
    reference = copy.deepcopy(model)
    x, target = batch(rows=8)
    train(model, sgd(model, lr=0.0), G=2)(x, target)
    for rows in (slice(0, 4), slice(4, 8)):
        reference(x[rows], target[rows])
    torch.testing.assert_close(model.norm.state_dict(), reference.norm.state_dict())


def test_copying_weights_to_the_host_changes_nothing_after_training():
    model = Regression()
    training = train(model)
    training(*batch())
    before = snapshot(model)
    training.copyWeightsToHost()
    assert training.copyWeightsToHostIfNeeded() is False
    assert_same(before, snapshot(model))


def test_frozen_parameters_stay():
    model = Regression()
    model.fc.bias.requires_grad_(False)
    before = snapshot(model)
    train(model)(*batch())
    assert torch.equal(model.fc.bias, before[0]["fc.bias"])
    assert not torch.equal(model.fc.weight, before[0]["fc.weight"])


def test_parameters_outside_the_optimiser_stay():
    model = Regression()
    before = snapshot(model)
    train(model, torch.optim.SGD([model.fc.weight], lr=0.1))(*batch())
    assert torch.equal(model.fc.bias, before[0]["fc.bias"])


def test_copy_to_host_if_needed_copies_the_buffers_of_an_inference_model_once():
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self):
            self.count += 1
            return self.count

    model = Counter()
    executor = infer(model)
    executor()
    assert model.count.item() == 0
    assert executor.copyWeightsToHostIfNeeded()
    assert model.count.item() == 1
    assert not executor.copyWeightsToHostIfNeeded()
