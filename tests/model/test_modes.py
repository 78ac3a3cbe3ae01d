"""An executor has a train and an eval mode of its own; the flags and parts of the module are frozen by compiling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Dropping(nn.Module):
    """Half of the features are dropped in training mode; the flag of the model itself shows in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, y=None):
        out = self.drop(self.fc(x)) + (100.0 if self.training else 0.0)
        return out if y is None else (out, F.mse_loss(out, y))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, y=None):
        out = self.norm(x)
        return out if y is None else (out, F.mse_loss(out, y))


X, Y = torch.randn(4, 8), torch.randn(4, 8)


def training(model: nn.Module, **how) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), **how)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def drops(result: torch.Tensor) -> bool:
    return bool(((result - 100.0) == 0).any() or (result == 0).any())


def test_eval_of_an_inference_model_leaves_the_shared_children_alone():
    model = Dropping()
    train, inference = training(model), poptorch.inferenceModel(model).eval()
    assert not drops(inference(X))
    assert all(modes(model))
    assert drops(train(X, Y)[0])


def test_each_mode_is_compiled_once():
    inference = poptorch.inferenceModel(Dropping().eval())
    results = [drops(inference.train(mode)(X)) for mode in (True, False, True, False)]
    assert results == [True, False, True, False]
    assert inference.compilationReport().startswith("2 program(s)")


def test_asking_for_the_mode_that_there_is_compiles_nothing():
    inference = poptorch.inferenceModel(Dropping().eval())
    inference(X)
    inference.eval()(X)
    assert inference.compilationReport().startswith("1 program(s)")


def test_training_flag_shows_the_mode_of_the_executor():
    model = Dropping()
    executor = training(model)
    assert executor.training
    executor.eval()
    assert not executor.training
    assert model.training


def test_both_programs_of_a_training_model_train_the_same_weights():
    model = Dropping()
    executor = training(model)
    executor(X, Y)
    after_train = model.fc.weight.detach().clone()
    executor.eval()(X, Y)
    assert not torch.equal(model.fc.weight, after_train)
    assert not drops(executor(X, Y)[0])
    assert drops(executor.train()(X, Y)[0])


def test_a_mode_asked_for_before_the_first_call_counts():
    assert not drops(poptorch.inferenceModel(Dropping()).eval()(X))


def test_flags_changed_on_the_module_before_the_first_call_count():
    model = Dropping()
    executor = training(model)
    model.drop.eval()
    assert not drops(executor(X, Y)[0])


def test_flags_changed_on_the_module_later_keep_the_compiled_mode_with_one_warning(caplog):
    model = Dropping()
    executor = training(model)
    executor(X, Y)
    model.drop.eval()
    for _ in range(2):
        assert drops(executor(X, Y)[0])
    warnings = [record.message for record in caplog.records if "after it was compiled" in record.message]
    assert len(warnings) == 1
    assert "drop" in warnings[0]
    assert "destroy()" in warnings[0]


def test_a_train_method_of_the_users_decides_which_parts_train():
    class Frozen(Dropping):
        def train(self, mode: bool = True):
            super().train(mode)
            self.drop.training = False
            self.trained = mode
            return self

    model = Frozen().eval()
    inference = poptorch.inferenceModel(model)
    result = inference.train()(X)
    assert not drops(result)
    assert result.min() > 50  # the model itself is in training mode
    assert modes(model) == [False, False, False]
    assert model.trained is False


def test_statistics_move_with_the_mode_of_an_inference_model():
    model = Norm()
    inference = poptorch.inferenceModel(model)
    x = torch.randn(64, 3) * 3 + 5
    twin = Norm()
    for _ in range(3):
        inference.train()(x)
        twin(x)
    torch.testing.assert_close(inference.eval()(x[:64]), twin.eval()(x).detach())
    assert torch.equal(model.norm.running_mean, torch.zeros(3))


def test_attributes_set_between_wrapping_and_the_first_call_count():
    class Factor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def forward(self, x):
            return x * self.factor

    model = Factor()
    inference = poptorch.inferenceModel(model)
    model.factor = 3.0
    assert inference(torch.ones(1)).item() == 3
    own = poptorch.inferenceModel(model)
    own.model.factor = 5.0  # on the copy that belongs to the executor
    assert own(torch.ones(1)).item() == 5


def test_training_with_a_replaced_submodule_is_refused():
    model = Dropping()
    executor = training(model)
    executor(X, Y)
    model.fc = nn.Linear(8, 8)
    with pytest.raises(poptorch.Error, match=r"submodule fc was replaced(?s:.*)destroy\(\)"):
        executor(X, Y)


def test_inference_with_a_replaced_submodule_keeps_its_snapshot_and_warns(caplog):
    model = Dropping().eval()
    inference = poptorch.inferenceModel(model)
    before = inference(X)
    inference.model.fc = nn.Linear(8, 8)
    assert torch.equal(inference(X), before)
    assert sum("changed on the host" in record.message for record in caplog.records) == 1
    with pytest.raises(poptorch.Error, match="submodule fc was replaced"):
        inference.copyWeightsToDevice()


def test_train_takes_a_boolean():
    with pytest.raises(poptorch.Error, match="train\\(\\) takes True or False, not 'yes'"):
        poptorch.inferenceModel(Dropping()).train("yes")
