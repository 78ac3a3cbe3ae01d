"""The CTC loss: one program for labels of all lengths, on every engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Speech(nn.Module):
    def __init__(self, reduction: str = "mean"):
        super().__init__()
        self.fc, self.reduction = nn.Linear(3, 5), reduction

    def forward(self, x, labels, input_lengths, target_lengths):
        scores = self.fc(x).log_softmax(-1)
        if scores.dim() == 3:
            scores = scores.transpose(0, 1)
        options = {"reduction": self.reduction, "zero_infinity": True}
        return scores, F.ctc_loss(scores, labels, input_lengths, target_lengths, **options)


def train(module: nn.Module, engine: str = "eager") -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine(engine)
    return poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))


def assert_same_step(training: poptorch.PoplarExecutor, module: nn.Module, *batch: torch.Tensor) -> None:
    plain = copy.deepcopy(module.state_dict())
    model = Speech(module.reduction)
    model.load_state_dict(plain)
    scores, loss = model(*batch)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(training(*batch), (scores, loss))
    torch.testing.assert_close(module.state_dict(), model.state_dict())


@pytest.mark.inductor
def test_lengths_may_change_from_batch_to_batch(engine):
    torch.manual_seed(0)
    module = Speech()
    training = train(module, engine)
    x, labels = torch.randn(2, 9, 3), torch.randint(1, 5, (2, 4))
    for target_lengths in ([1, 2], [4, 3], [0, 1]):
        assert_same_step(training, module, x, labels, torch.tensor([9, 7]), torch.tensor(target_lengths))


@pytest.mark.parametrize("as_lists", [False, True])
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("blank", [0, 3])
def test_every_option_of_the_module_trains_as_natively(blank, reduction, zero_infinity, as_lists):
    class Fixed(nn.Module):
        """Lengths are constants of the model, as lists or as tensors."""

        def __init__(self):
            super().__init__()
            self.fc, self.loss = nn.Linear(5, 5), nn.CTCLoss(blank, reduction, zero_infinity)
            self.lengths = [10, 9, 10, 7], [3, 2, 1, 3]

        def forward(self, x, labels):
            scores = self.fc(x).log_softmax(-1)
            lengths = self.lengths if as_lists else [torch.tensor(each) for each in self.lengths]
            return scores, self.loss(scores, labels, *lengths)

    torch.manual_seed(0)
    module, x = Fixed(), torch.randn(10, 4, 5)
    labels = torch.tensor([1, 2, 4])[torch.randint(3, (4, 3))]
    plain = copy.deepcopy(module)
    expected = plain(x, labels)
    expected[1].backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(train(module)(x, labels), expected)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_labels_may_be_joined_to_one_vector():
    torch.manual_seed(0)
    module = Speech("sum")
    lengths = torch.tensor([9, 7]), torch.tensor([3, 1])
    assert_same_step(train(module), module, torch.randn(2, 9, 3), torch.randint(1, 5, (4,)), *lengths)


def test_a_single_sequence_needs_no_batch_dimension():
    torch.manual_seed(0)
    module = Speech("sum")
    assert_same_step(
        train(module), module, torch.randn(9, 3), torch.randint(1, 5, (4,)), torch.tensor([9]), torch.tensor([4])
    )


def test_float16_scores_give_a_float16_loss():
    torch.manual_seed(0)
    module = Speech()
    x, labels = torch.randn(2, 9, 3), torch.randint(1, 5, (2, 4))
    lengths = torch.tensor([9, 7]), torch.tensor([3, 1])
    expected = module(x, labels, *lengths)[1]
    loss = train(module.half())(x.half(), labels, *lengths)[1]
    assert loss.dtype == torch.float16
    torch.testing.assert_close(loss.float(), expected, rtol=1e-2, atol=1e-2)
