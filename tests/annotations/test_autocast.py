"""Regions of mixed precision: which operations are cast, by which rule, and where the region ends."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply
from poptorch.autocasting import Policy

HALF, FLOAT = torch.float16, torch.float32


def options(policy: Policy | None = None) -> poptorch.Options:
    options = poptorch.Options().engine("eager")
    return options if policy is None else (options.Precision.autocastPolicy(policy), options)[1]


def types(function, policy: Policy | None = None, x: torch.Tensor | None = None) -> list[torch.dtype]:
    """The types of what a function computes inside a region."""
    model = poptorch.inferenceModel(Apply(poptorch.autocast()(function)), options(policy))
    results = model(torch.ones(2, 2) if x is None else x)
    return [result.dtype for result in (results if isinstance(results, tuple) else (results,))]


def test_usual_policy_multiplies_in_float16_and_exponentiates_in_float32():
    assert types(lambda x: (x @ x, x.matmul(x), torch.mm(x, x), F.linear(x, x))) == [HALF] * 4
    assert types(lambda x: (x @ x).softmax(-1)) == [FLOAT]
    assert types(lambda x: (torch.relu(x), torch.relu(x @ x))) == [FLOAT, HALF]
    assert types(lambda x: (x @ x + x, x - x @ x, torch.cat([x, x @ x]))) == [FLOAT] * 3


def test_operations_outside_the_region_are_left_alone():
    def forward(x):
        before = x @ x
        with poptorch.autocast():
            inside = x @ x
            with poptorch.autocast(enabled=False):
                excluded = x @ x
            again = x @ x
        return before, inside, excluded, again, x @ x

    results = poptorch.inferenceModel(Apply(forward), options())(torch.ones(2, 2))
    assert [result.dtype for result in results] == [FLOAT, HALF, FLOAT, HALF, FLOAT]


def test_region_ends_with_an_exception_and_does_nothing_on_the_host():
    @poptorch.autocast()
    def fail():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FLOAT
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    plain = poptorch.inferenceModel(Apply(lambda x: x @ x), options())
    assert plain(torch.ones(2, 2)).dtype is FLOAT


def test_option_switches_all_regions_off():
    opts = options()
    opts.Precision.autocastEnabled(False)
    model = poptorch.inferenceModel(Apply(poptorch.autocast()(lambda x: x @ x)), opts)
    assert model(torch.ones(2, 2)).dtype is FLOAT


def test_policy_names_functions_in_every_spelling():
    policy = Policy(fp16=[torch.relu, torch.add], fp32=[torch.matmul])
    assert types(lambda x: (x.relu(), F.relu(x), torch.relu(x), x + 1, 1 + x), policy) == [HALF] * 5
    assert types(lambda x: (x @ x, torch.matmul(x, x)), policy, torch.ones(2, 2).half()) == [FLOAT] * 2
    assert types(lambda x: F.linear(x, x), policy) == [FLOAT], "the list replaces the usual one"


def test_promote_and_demote_unify_what_is_mixed():
    def mixed(x):
        return x * x.half(), torch.maximum(x, x.half()), x * x, (x * x.half()) * x.half()

    assert types(mixed, Policy(promote=[torch.mul], demote=[torch.maximum])) == [FLOAT, HALF, FLOAT, FLOAT]


def test_in_place_operations_change_the_operand_itself():
    def forward(x):
        y = x.clone()
        y.relu_()
        y += 1
        return y

    model = poptorch.inferenceModel(Apply(poptorch.autocast()(forward)), options(Policy(fp16=[torch.relu, torch.add])))
    result = model(-torch.ones(2, 2))
    assert result.dtype is FLOAT
    assert (result == 1).all()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 1)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    @poptorch.autocast()
    def forward(self, x):
        x = self.conv(x)
        return x, self.block(x.float())


def test_policy_names_classes_of_modules():
    x = torch.randn(2, 2, 3)
    convolution, block = poptorch.inferenceModel(Layers(), options(Policy(fp32=[nn.Conv1d], fp16=[nn.Linear])))(x)
    assert (convolution.dtype, block.dtype) == (FLOAT, HALF)
    convolution, block = poptorch.inferenceModel(Layers(), options(Policy(fp16=[nn.Conv1d], fp32=[nn.Sequential])))(x)
    assert (convolution.dtype, block.dtype) == (HALF, FLOAT)


def test_statistics_of_a_norm_in_float16_are_kept():
    class Norm(nn.BatchNorm1d):
        forward = poptorch.autocast()(nn.BatchNorm1d.forward)

    norm, policy = Norm(2), Policy(fp16=[nn.BatchNorm1d], fp32=[], promote=[], demote=[])
    model = poptorch.inferenceModel(norm, options(policy))
    assert model(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).dtype is HALF
    model.copyWeightsToHost()
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.2, 0.4]), rtol=1e-3, atol=1e-3)


def test_training_keeps_weights_in_float32_and_follows_torch_autocast():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, y):
            with poptorch.autocast():
                return F.cross_entropy(self.fc(x), y)

    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 4), torch.randint(3, (8,))
    reference = copy.deepcopy(model)
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(3):
        loss = training(x, y)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=HALF):
            expected = F.cross_entropy(reference.fc(x).float(), y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=1e-3)
    assert model.fc.weight.dtype is FLOAT
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-2, atol=1e-3)


def test_decorated_function_may_call_itself():
    @poptorch.autocast()
    def power(x, n):
        return x if n == 0 else power(x, n - 1) @ x

    assert types(lambda x: (power(x, 3), torch.exp(power(x, 2)))) == [HALF, FLOAT]


def test_mistakes_are_refused():
    for wrong in ([3], "relu", 7):
        with pytest.raises(AssertionError, match="Policy fp16"):
            Policy(fp16=wrong)
    with pytest.raises(AssertionError, match="relu in more than one place"):
        Policy(fp16=[torch.relu], demote=[F.relu])
    with pytest.raises(AssertionError, match=r"autocasting\.Policy"):
        options().Precision.autocastPolicy({"fp16": []})
    with pytest.raises(AssertionError, match="autocastEnabled"):
        options().Precision.autocastEnabled(1)
    with pytest.raises(AssertionError, match="autocast takes"):
        poptorch.autocast("float16")


def test_policy_prints_copies_and_travels():
    policy = Policy(fp16=[torch.relu, nn.Conv2d])
    assert repr(policy) == "Policy(fp16=[relu, Conv2d])"
    assert repr(Policy()) == "Policy()"
    opts = options(policy)
    assert opts.clone().Precision.autocast_policy == policy
    assert pickle.loads(pickle.dumps(opts)).Precision.autocast_policy == policy
    assert "autocast_policy=Policy(fp16=[relu, Conv2d])" in repr(opts)
