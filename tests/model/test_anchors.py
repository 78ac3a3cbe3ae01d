"""Tensors of the graph by name: which there are, and what each call computed for them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch.enums import OutputMode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1 = nn.Linear(10, 10)
        self.blocks = nn.Sequential(nn.ReLU(), nn.Linear(10, 10))
        self.fc2 = nn.Linear(10, 10)
        self.loss = nn.MSELoss()

    def forward(self, x, y):
        out = self.fc2(self.blocks(self.fc1(x)))
        return out, self.loss(out, y)


def options(**anchors) -> poptorch.Options:
    made = poptorch.Options().engine("eager")
    for short, wanted in anchors.items():
        made.anchorTensor(short, *(wanted if isinstance(wanted, tuple) else (wanted,)))
    return made


def trained(chosen: poptorch.Options, module: Net | None = None) -> tuple[poptorch.PoplarExecutor, Net]:
    module = Net() if module is None else module
    return poptorch.trainingModel(module, chosen, torch.optim.SGD(module.parameters(), lr=0.01)), module


X, Y = torch.randn(8, 10), torch.randn(8, 10)


def test_names_exist_only_after_compilation():
    model, _ = trained(options())
    with pytest.raises(AssertionError):
        model.getTensorNames()
    model.compile(X, Y)
    names = model.getTensorNames()
    starts = ("input", "loss", "Gradient___", "UpdatedVar__", "scaledLearningRate", "weightDecayScaleFactor")
    for pattern in (r"\bfc1\b", r"\bfc2\b", *(f"^{start}" for start in starts)):
        assert any(re.search(pattern, name) for name in names), pattern
    assert {"fc1/MatMul:0", "blocks/0/Relu:0", "blocks/1/MatMul:0", "fc2.bias", "input/x"} <= set(names)
    assert len(set(names)) == len(names)


def test_names_without_paths():
    model, _ = trained(options().disableModuleNamescope())
    model.compile(X, Y)
    names = model.getTensorNames()
    assert "MatMul:0" in names
    assert not any(name.startswith("fc1/") for name in names)


def test_gradients_and_updated_weights():
    model, module = trained(options(grad="Gradient___fc2.bias", new="UpdatedVar___fc2.weight", act="blocks/0/Relu:0"))
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    previous = None
    for _ in range(3):
        out, _ = model(X, Y)
        optimizer.zero_grad()
        expected, loss = reference(X, Y)
        loss.backward()
        torch.testing.assert_close(model.getAnchoredTensor("grad"), reference.fc2.bias.grad)
        torch.testing.assert_close(model.getAnchoredTensor("act"), F.relu(reference.fc1(X)).detach())
        optimizer.step()
        torch.testing.assert_close(model.getAnchoredTensor("new"), reference.fc2.weight.detach())
        torch.testing.assert_close(model.getAnchoredTensor("new"), module.fc2.weight.detach())
        torch.testing.assert_close(out, expected.detach())
        assert previous is None or not torch.equal(previous, model.getAnchoredTensor("new"))
        previous = model.getAnchoredTensor("new")


def test_the_gradient_of_a_padding_row_is_zero():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 3, padding_idx=0)

        def forward(self, words):
            rows = self.table(words)
            return rows, poptorch.identity_loss(rows.square() + rows, "sum")

    words, reference = torch.tensor([[0, 1, 4], [2, 0, 1]]), Words()
    reference(words)[1].backward()
    model, _ = trained(options(grad="Gradient___table.weight"), Words())
    model(words)
    gradient = model.getAnchoredTensor("grad")
    torch.testing.assert_close(gradient, reference.table.weight.grad)
    assert not gradient[0].any()
    assert gradient[1].all()


def test_numbers_of_the_optimiser_are_those_of_the_last_call():
    chosen = options(
        decay="weightDecayScaleFactor0___specific___fc1.bias", lr="scaledLearningRate0___specific___fc1.bias"
    )
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    model = poptorch.trainingModel(module, chosen, optimizer)
    model(X, Y)
    optimizer.param_groups[0]["lr"] = 0.2
    model.setOptimizer(optimizer)
    torch.testing.assert_close(model.getAnchoredTensor("decay"), torch.tensor(1 - 0.1 * 0.5))
    torch.testing.assert_close(model.getAnchoredTensor("lr"), torch.tensor(0.1))
    model(X, Y)
    torch.testing.assert_close(model.getAnchoredTensor("decay"), torch.tensor(1 - 0.2 * 0.5))


def test_number_that_the_optimiser_does_not_have():
    model, _ = trained(options(decay="adamBeta1___specific___fc1.bias"))
    with pytest.raises(poptorch.Error, match="which the optimiser does not have"):
        model(X, Y)
    assert not model.isCompiled()


@pytest.mark.parametrize("scaling", [1.0, 2.0])
def test_final_loss_scale_is_the_scale_times_the_factor_before_the_call(scaling):
    chosen = options(final="finalLossScale")
    chosen.Training.setAutomaticLossScaling(True)
    module = Net().half()
    optimizer = poptorch.optim.Adam(module.parameters(), lr=0.01, loss_scaling=scaling)
    model = poptorch.trainingModel(module, chosen, optimizer)
    model.compile(X.half(), Y.half())
    for _ in range(5):
        factor = optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]
        model(X.half(), Y.half())
        torch.testing.assert_close(model.getAnchoredTensor("final"), scaling * factor)


@pytest.mark.parametrize(
    ("mode", "rows"),
    [((OutputMode.All,), 8), ((OutputMode.Final,), 2), ((OutputMode.Sum,), 2), ((OutputMode.EveryN, 2), 4)],
)
def test_each_anchor_has_a_mode_of_its_own(mode, rows):
    model, _ = trained(options(act=("fc1/MatMul:0", *mode)).deviceIterations(4))
    model(X, Y)
    assert model.getAnchoredTensor("act").shape == (rows, 10)


@pytest.mark.parametrize("mode", [(OutputMode.All,), (OutputMode.EveryN, 4), (OutputMode.Final,), (OutputMode.Sum,)])
def test_any_mode_works_with_one_iteration(mode):
    model, _ = trained(options(act=("fc1/MatMul:0", *mode)))
    model(X, Y)
    assert model.getAnchoredTensor("act").shape == (8, 10)


def test_anchors_with_accumulation_and_replicas():
    chosen = options(grad="Gradient___fc2.bias", new="UpdatedVar___fc2.bias").replicationFactor(2)
    chosen.Training.gradientAccumulation(2)
    model, module = trained(chosen)
    model(X, Y)
    assert model.getAnchoredTensor("grad").shape == (20,)
    torch.testing.assert_close(model.getAnchoredTensor("new"), module.fc2.bias.detach().repeat(2))


def test_anchors_do_not_change_the_outputs():
    plain, _ = trained(poptorch.Options().engine("eager"))
    anchored, _ = trained(options(act="blocks/0/Relu:0", x="input/x"))
    for ours, theirs in zip(anchored(X, Y), plain(X, Y), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(anchored.getAnchoredTensor("x"), X)


def test_inference_has_anchors_too():
    module = Net()
    model = poptorch.inferenceModel(module, options(act="fc1/MatMul:0", w="fc1.weight").deviceIterations(2))
    model(X, Y)
    torch.testing.assert_close(model.getAnchoredTensor("act"), module.fc1(X).detach())


def test_unknown_names():
    model, _ = trained(options(act="fc1/MatMull:0"))
    with pytest.raises(poptorch.Error, match=r"fc1/MatMull:0(.|\n)*fc1/MatMul:0"):
        model(X, Y)
    model, _ = trained(options(act="fc1/MatMul:0"))
    with pytest.raises(AssertionError, match="call the model first"):
        model.getAnchoredTensor("act")
    model(X, Y)
    with pytest.raises(AssertionError, match=r"'acts' is no anchor.*act"):
        model.getAnchoredTensor("acts")
