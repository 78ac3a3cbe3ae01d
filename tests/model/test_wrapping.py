"""What trainingModel and inferenceModel accept, and whose the model is then."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import poptorch
from model.executors import batch, infer, options, sgd, train
from models import Regression


def test_end_to_end():
    """D = 4 updates of G = 2 micro-batches in one call equal the same four updates in plain PyTorch."""
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    training = train(model, D=4, G=2)
    x, target = batch(rows=2 * 8)
    out, loss = training(x, target)
    predicted = infer(model)(x, target)[0]

    optimizer = sgd(reference)
    for d in range(4):
        optimizer.zero_grad()
        for g in range(2):
            rows = slice((d * 2 + g) * 2, (d * 2 + g) * 2 + 2)
            expected_out, expected_loss = reference(x[rows], target[rows])
            (expected_loss / 2).backward()
        optimizer.step()
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(predicted, reference(x, target)[0])
    assert loss.shape == ()


@pytest.mark.inductor
def test_training_matches_plain_pytorch(engine):
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    made = poptorch.Options().engine(engine).deviceIterations(2)
    training = poptorch.trainingModel(model, made, sgd(model, momentum=0.9))
    optimizer = sgd(reference, momentum=0.9)
    for seed in range(3):
        x, target = batch(rows=8, seed=seed)
        training(x, target)
        for rows in (slice(0, 4), slice(4, 8)):
            optimizer.zero_grad()
            reference(x[rows], target[rows])[1].backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-6)


def test_wrapping_twice_is_refused():
    model = Regression()
    training = train(model)
    with pytest.raises(RuntimeError, match="Model has already been wrapped"):
        train(model)
    assert not training.isCompiled()


@pytest.mark.parametrize("compiled", [False, True])
def test_after_destroy_the_model_can_be_wrapped_again(compiled):
    model = Regression()
    training = train(model)
    if compiled:
        training(*batch())
    training.destroy()
    train(model)(*batch())


def test_a_forgotten_executor_does_not_hold_the_model():
    model = Regression()
    train(model)(*batch())
    gc.collect()
    train(model)


def test_wrapping_an_executor_wraps_its_model():
    model = Regression()
    training = train(model)
    training.destroy()
    assert poptorch.trainingModel(training, options(), sgd(model)).model is model


def test_the_model_of_a_training_executor_is_the_users():
    model = Regression()
    assert train(model).model is model


def test_the_model_of_an_inference_executor_is_a_shallow_copy():
    model = Regression()
    inference = infer(model)
    assert inference.model is not model
    assert inference.model.fc is model.fc


def test_wrapping_keeps_the_mode_of_the_model():
    model = Regression().eval()
    assert infer(model).training is False


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_options_must_be_options(wrap):
    with pytest.raises(poptorch.Error, match="Options"):
        wrap(Regression(), {"deviceIterations": 2})


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_model_must_be_a_module(wrap):
    with pytest.raises(poptorch.Error, match="Module"):
        wrap(lambda x: x)


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_inference_accumulates_no_gradients(strategy):
    made = options(G=2).setExecutionStrategy(strategy(poptorch.AutoStage.AutoIncrement))
    text = r"You must set poptorch\.Options\(\)\.Training\.gradientAccumulation to 1; deviceIterations"
    with pytest.raises(poptorch.Error, match=rf"(?s)gradientAccumulation is 2.*{text}"):
        poptorch.inferenceModel(Regression(), made)


def test_without_an_optimiser_it_is_plain_gradient_descent():
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    x, target = batch()
    poptorch.trainingModel(model, options())(x, target)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    reference(x, target)[1].backward()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_training_a_model_without_parameters_fails_like_torch():
    class Nothing(nn.Module):
        def forward(self, x):
            return poptorch.identity_loss(x, "mean")

    with pytest.raises(ValueError, match="empty parameter list"):
        poptorch.trainingModel(Nothing(), options())


def test_replicas_with_the_same_rows_update_like_one():
    def train(replicas):
        torch.manual_seed(0)
        module = Regression()
        made = poptorch.Options().engine("eager").replicationFactor(replicas)
        executor = poptorch.trainingModel(module, made, torch.optim.SGD(module.parameters(), lr=0.1))
        x, target = torch.randn(4, 3), torch.randn(4, 2)
        for _ in range(3):
            executor(x.repeat(replicas, 1), target.repeat(replicas, 1))
        return module.fc.weight.detach()

    torch.testing.assert_close(train(2), train(1))
