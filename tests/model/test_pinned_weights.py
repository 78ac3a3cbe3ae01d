"""Who sees which weights when, as the original's tests pin it, where one owner of the weights keeps it."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Regression


def options(d: int = 1) -> poptorch.Options:
    return poptorch.Options().engine("eager").deviceIterations(d)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


class Classifier(nn.Module):
    """Predicts one of ten labels; trains when labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x, labels=None):
        y = self.linear(x)
        return y if labels is None else (y, F.cross_entropy(y, labels))


def labelled(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 10, generator=generator).to(dtype), torch.randint(0, 10, (10,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("read", [False, True], ids=["directly", "after reading parameters"])
def test_inference_predicts_what_training_learned_without_a_copy(dtype, read):
    torch.manual_seed(0)
    module = Classifier().to(dtype)
    training = poptorch.trainingModel(module, options(d=10), sgd(module))
    inference = poptorch.inferenceModel(module, options())
    x, labels = labelled(dtype)
    for _ in range(100):
        training(x.repeat(10, 1), labels.repeat(10))
    if read:
        assert len(list(module.named_parameters())) == 2
    assert torch.equal(inference(x).argmax(1), labels)


def test_printed_weight_changes_by_training_and_not_by_inference():
    module = Classifier()
    x, labels = labelled()
    before = str(module.linear.weight)
    poptorch.inferenceModel(module, options())(x)
    assert str(module.linear.weight) == before
    poptorch.trainingModel(module, options(), sgd(module))(x, labels)
    assert str(module.linear.weight) != before


def test_training_needs_no_copy_to_the_host():
    module = Classifier()
    training = poptorch.trainingModel(module, options(), sgd(module))
    training(*labelled())
    seen = module.linear.weight.detach().clone()
    assert training.copyWeightsToHostIfNeeded() is False
    training.copyWeightsToHost()
    assert torch.equal(module.linear.weight, seen)


def test_wrapping_after_native_training_uses_the_trained_weights():
    module = Classifier()
    x, labels = labelled()
    optimizer = sgd(module)
    module(x, labels)[1].backward()
    optimizer.step()
    torch.testing.assert_close(poptorch.inferenceModel(module, options())(x), module(x).detach())


def test_native_training_after_compiling_changes_nothing_until_copied():
    module = Classifier()
    x, labels = labelled()
    inference = poptorch.inferenceModel(module, options())
    before = inference(x)
    optimizer = sgd(module)
    module(x, labels)[1].backward()
    optimizer.step()
    assert torch.equal(inference(x), before)
    inference.copyWeightsToDevice()
    torch.testing.assert_close(inference(x), module(x).detach())


def test_zero_dimensional_parameter_is_trained():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return poptorch.identity_loss(x * self.w, "sum")

    module = Model()
    training = poptorch.trainingModel(module, options(), sgd(module))
    training(torch.tensor([2.0]))
    assert module.w.item() == pytest.approx(0.8)
    training.copyWeightsToHost()
    assert module.w.item() == pytest.approx(0.8)


@pytest.mark.parametrize("swapped", [False, True])
def test_comparing_a_trained_weight_with_its_start(swapped):
    module = Classifier()
    start = module.linear.weight.detach().clone()
    poptorch.trainingModel(module, options(), sgd(module))(*labelled())
    pair = (start, module.linear.weight) if swapped else (module.linear.weight, start)
    assert not torch.equal(*pair)


def test_compile_then_call():
    module = Regression()
    training = poptorch.trainingModel(module, options(), sgd(module))
    expected = module(*batch())[1].detach()
    training.compile(*batch())
    torch.testing.assert_close(training(*batch())[1], expected)


def test_saved_model_has_the_trained_weights_and_its_own_class():
    module = Regression()
    start = module.fc.weight.detach().clone()
    training = poptorch.trainingModel(module, options(), sgd(module))
    training(*batch())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Regression
    assert torch.equal(loaded.fc.weight, module.fc.weight)
    assert torch.equal(loaded.fc.weight, training.model.fc.weight)
    assert not torch.equal(loaded.fc.weight, start)
    training(*batch())
    assert not torch.equal(loaded.fc.weight, module.fc.weight)


def test_saved_state_holds_plain_tensors_only():
    module = Regression()
    training = poptorch.trainingModel(module, options(), sgd(module))
    training(*batch())
    file = io.BytesIO()
    torch.save(training.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert torch.equal(loaded["fc.weight"], module.fc.weight)


@pytest.mark.parametrize("again", ["model", "executor"])
def test_two_runs_of_five_updates_are_one_of_ten(again):
    def fresh():
        torch.manual_seed(0)
        return Regression()

    x, target = batch(20)
    long = fresh()
    poptorch.trainingModel(long, options(d=10), sgd(long))(x, target)
    module = fresh()
    training = poptorch.trainingModel(module, options(d=5), sgd(module))
    with pytest.raises(RuntimeError, match="Model has already been wrapped"):
        poptorch.trainingModel(module, options(d=5), sgd(module))
    training(x[:10], target[:10])
    (module if again == "model" else training).destroy()
    second = poptorch.trainingModel(module if again == "model" else training, options(d=5), sgd(module))
    second(x[10:], target[10:])
    torch.testing.assert_close(module.fc.weight, long.fc.weight)


def test_destroyed_training_model_has_no_program_but_inference_goes_on():
    module = Regression()
    training = poptorch.trainingModel(module, options(), sgd(module))
    inference = poptorch.inferenceModel(module, options())
    training(*batch())
    expected = inference(*batch())[0]
    training.destroy()
    for method in (training.copyWeightsToHost, training.copyWeightsToDevice):
        with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed"):
            method()
    assert torch.equal(inference(*batch())[0], expected)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm1d(3, momentum=0.1), nn.Linear(3, 2)

    def forward(self, x, target):
        y = self.fc(self.bn(x))
        return y, F.mse_loss(y, target)


def test_batch_norm_statistics_after_one_training_call():
    module = Normed()
    training = poptorch.trainingModel(module, options(), sgd(module))
    training(torch.ones(4, 3), torch.ones(4, 2))
    assert torch.allclose(module.bn.running_mean, torch.full((3,), 0.1))
    training.copyWeightsToHost()
    assert torch.allclose(module.bn.running_mean, torch.full((3,), 0.1))


def test_training_then_inference_of_one_batch_norm_model():
    module = Normed()
    x, target = batch()
    poptorch.trainingModel(module, options(), sgd(module))(x, target)
    module.eval()
    inference = poptorch.inferenceModel(module, options())
    torch.testing.assert_close(inference(x, target)[0], module(x, target)[0].detach())


def test_batch_norm_in_eval_mode_keeps_its_statistics_while_training():
    module = Normed()
    module.bn.running_mean.fill_(0.5)
    module.bn.eval()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x, target = batch()
    expected = module(x, target)[0].detach()
    training = poptorch.trainingModel(module, options(), sgd(module))
    torch.testing.assert_close(training(x, target)[0], expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x, target=None):
        y = self.decode(torch.tanh(self.encode(x)))
        return y if target is None else F.mse_loss(y, target)


@pytest.mark.parametrize("make", [torch.optim.Adam, poptorch.optim.Adam])
def test_training_and_inference_take_turns_on_one_device_with_tied_weights(make):
    """Detaching and attaching changes neither weights nor the state of the optimiser."""
    torch.manual_seed(0)
    module, x = Tied(), torch.randn(8, 4)
    reference = copy.deepcopy(module)
    optimizer, theirs = make(module.parameters(), lr=0.05), torch.optim.Adam(reference.parameters(), lr=0.05)
    training = poptorch.trainingModel(module, options().useIpuId(0), optimizer)
    inference = poptorch.inferenceModel(module, options().useIpuId(0))
    losses, predictions = [], []
    for _ in range(4):
        losses.append(training(x, x).item())
        training.detachFromDevice()
        predictions.append(inference(x))
        inference.detachFromDevice()
        theirs.zero_grad()
        reference(x, x).backward()
        theirs.step()
        torch.testing.assert_close(predictions[-1], reference(x).detach(), rtol=1e-4, atol=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert module.encode.weight is module.decode.weight


def test_new_learning_rate_is_logged_and_no_weight_is_copied(caplog):
    module = Regression()
    optimizer = sgd(module)
    training = poptorch.trainingModel(module, options(), optimizer)
    training(*batch())
    optimizer.param_groups[0]["lr"] = 0.25
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        training.setOptimizer(optimizer)
        training(*batch())
    assert "optimizer with SGD" in caplog.text
    assert "0.25" in caplog.text
    assert "Writing weights" not in caplog.text
    assert "copyWeights" not in caplog.text


def test_log_shows_when_an_inference_model_copies_its_weights(caplog):
    module = Regression()
    training = poptorch.trainingModel(module, options(), sgd(module))
    inference = poptorch.inferenceModel(module, options())
    inference(*batch())
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        inference(*batch())
        assert "weights" not in caplog.text.lower()
        training(*batch())
        inference(*batch())
        assert "Implicit copyWeightsToDevice()" in caplog.text
        assert caplog.text.count("Writing weights from host to IPU memory") == 1
        inference.copyWeightsToHost()
        assert caplog.text.count("Writing weights from IPU to host") == 1
