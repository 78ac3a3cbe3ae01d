"""`nn.AdaptiveLogSoftmaxWithLoss`: one program for batches with any number of rare labels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch


class Words(nn.Module):
    def __init__(self, adaptive: type[nn.AdaptiveLogSoftmaxWithLoss] = nn.AdaptiveLogSoftmaxWithLoss) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 16)
        self.loss = adaptive(16, 20, [4, 10], head_bias=True)

    def forward(self, x, labels):
        output, loss = self.loss(self.fc(x), labels)
        return output, loss


def wrap(model: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_batches_with_any_labels_train_as_in_plain_pytorch():
    torch.manual_seed(0)
    model = Words()
    twin = copy.deepcopy(model)
    training, optimizer = wrap(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    for labels in ([0, 1, 2, 3], [19, 10, 4, 0], [9, 9, 9, 9], [15, 16, 17, 18]):
        x, target = torch.randn(4, 4), torch.tensor(labels)
        found = training(x, target)
        optimizer.zero_grad()
        expected = twin(x, target)
        expected[1].backward()
        optimizer.step()
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_one_label_needs_no_dimension_for_the_batch():
    torch.manual_seed(0)
    model = Words()
    expected = model(torch.ones(4), torch.tensor(12))
    torch.testing.assert_close(poptorch.inferenceModel(model)(torch.ones(4), torch.tensor(12)), expected)


def test_the_module_has_its_own_forward_afterwards():
    model = Words()
    wrap(model)(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    assert "forward" not in vars(model.loss)


def test_a_label_out_of_range_is_refused_with_the_line():
    training = wrap(Words())
    training(torch.ones(2, 4), torch.tensor([0, 19]))
    with pytest.raises(poptorch.Error, match=r"labels leads to the index 20(?s:.*)self\.loss\(self\.fc"):
        training(torch.ones(2, 4), torch.tensor([0, 20]))


def test_wrong_shapes_are_refused_as_in_plain_pytorch():
    with pytest.raises(RuntimeError, match="same size in the batch dimension"):
        wrap(Words())(torch.ones(2, 4), torch.zeros(4, dtype=torch.int64))


def test_a_class_with_a_forward_of_its_own_keeps_it():
    class Doubled(nn.AdaptiveLogSoftmaxWithLoss):
        def forward(self, input_, target_):
            return poptorch.identity_loss(input_.sum(), "none") * 2, target_

    model = Words(Doubled)
    with torch.no_grad():
        expected = model.fc(torch.ones(1, 4)).sum() * 2
    found = poptorch.inferenceModel(model)(torch.ones(1, 4), torch.tensor([1]))[0]
    torch.testing.assert_close(found, expected)
