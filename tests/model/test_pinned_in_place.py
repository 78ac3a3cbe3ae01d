"""Inputs and buffers that `forward` changes in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from models import Apply


def wrap(module: nn.Module, engine: str = "eager") -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, poptorch.Options().engine(engine))


def _iadd(x):
    x += 1


def _isub(x):
    x -= 1


def _imul(x):
    x *= 3


def _idiv(x):
    x /= 2


def _zero_then_add(x):
    x.zero_()
    x += 4


def _fill_then_add(x):
    x.fill_(2)
    x += 4


def _chained(x):
    x += 1
    x += 2
    x += 3


def _copy_twice(x):
    y = x + 1
    x.copy_(y * 5)
    x.copy_(y * 7)


def _slices(x):
    x[0:2] = 9
    x[3:] += 1


def _through_a_view(x):
    x.view(2, 2).select(0, 1).mul_(10)


def _single_elements(x):
    t = x.view(2, 1, 2)
    t[0] += 2
    t[1][0] *= 3
    t[1][0][1] += 4


CHANGES = {
    "+=": _iadd,
    "-=": _isub,
    "*=": _imul,
    "/=": _idiv,
    "masked_fill_": lambda x: x.masked_fill_(x > 2, 0.5),
    "zero_, +=": _zero_then_add,
    "fill_, +=": _fill_then_add,
    "chained": _chained,
    "copy_ twice": _copy_twice,
    "slices": _slices,
    "single elements": _single_elements,
    "every second": lambda x: x[::2].fill_(5),
    "through a view": _through_a_view,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_callers_tensor_changes_as_in_pytorch(change):
    function = CHANGES[change]
    model = wrap(Apply(lambda x: (function(x), None)[1]))
    x, expected = torch.arange(4.0), torch.arange(4.0)
    for _ in range(2):
        assert model(x) is None
        function(expected)
        assert torch.equal(x, expected)


@pytest.mark.inductor
def test_native_code_changes_the_callers_tensor(engine):
    model = wrap(Apply(lambda x: (_chained(x), x * 2)[1]), engine)
    x = torch.ones(3)
    assert torch.equal(model(x), torch.full((3,), 14.0))
    assert torch.equal(x, torch.full((3,), 7.0))


@pytest.mark.parametrize(
    "nest",
    [lambda x: [x], lambda x: ({"k": x},), lambda x: (torch.zeros(1), x)],
    ids=["list", "dictionary in a tuple", "second of a tuple"],
)
def test_nested_input_is_changed_too(nest):
    def function(value):
        while not isinstance(value, torch.Tensor):
            value = value["k"] if isinstance(value, dict) else value[-1]
        value += 1

    x = torch.ones(1)
    model = wrap(Apply(function))
    model(nest(x))
    model(nest(x))
    assert x.item() == 3


def test_only_the_argument_that_was_changed_changes():
    def function(nested, x):
        x += nested[0] + nested[1][0]

    nested, x = (torch.ones(1), (torch.ones(1),)), torch.ones(1)
    wrap(Apply(function))(nested, x)
    assert (nested[0].item(), nested[1][0].item(), x.item()) == (1, 1, 3)


def test_another_input_may_be_added_again_and_again():
    def function(x, y):
        x += y
        x += 2
        x += y

    x, y = torch.ones(1), torch.full((1,), 2.0)
    wrap(Apply(function))(x, y)
    assert (x.item(), y.item()) == (7, 2)


def test_tensors_of_earlier_calls_stay_as_they_are():
    model = wrap(Apply(_iadd))
    first, second = torch.ones(1), torch.full((1,), 5.0)
    model(first)
    model(second)
    assert (first.item(), second.item()) == (2, 6)


def test_a_model_that_is_compiled_again_changes_the_tensors_of_a_list():
    def function(value):
        for tensor in value if isinstance(value, list) else [value]:
            tensor += 1

    model, x, y = wrap(Apply(function)), torch.ones(1), torch.zeros(1)
    model(x)
    model.destroy()
    model([x, y])
    assert (x.item(), y.item()) == (3, 1)


def test_changing_an_intermediate_leaves_the_input_alone():
    def function(x):
        y = x + 1
        y += 1
        return y

    x = torch.ones(1)
    assert wrap(Apply(function))(x).item() == 3
    assert x.item() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8])
def test_any_type_is_written_back_in_its_own_type(dtype):
    x = torch.ones(2, dtype=dtype)
    wrap(Apply(_iadd))(x)
    assert torch.equal(x, torch.full((2,), 2, dtype=dtype))


def test_input_that_is_not_contiguous_stays_as_it_is():
    x = torch.ones(2, 4)[:, ::2]
    wrap(Apply(_iadd))(x)
    assert torch.equal(x, torch.ones(2, 2))


def test_input_that_requires_a_gradient_is_changed():
    x = torch.ones(2, requires_grad=True)
    wrap(Apply(_iadd))(x)
    assert torch.equal(x.detach(), torch.full((2,), 2.0))


@pytest.mark.parametrize(("d", "g", "r"), [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_every_micro_batch_of_a_training_call_is_written_back(d, g, r):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, xs):
            (x,) = xs
            x += 1
            y = self.fc(x)
            return poptorch.identity_loss(y, "sum")

    options = poptorch.Options().engine("eager").deviceIterations(d).replicationFactor(r)
    options.Training.gradientAccumulation(g)
    x = torch.arange(1.0 * d * g * r).reshape(-1, 1)
    expected = x + 1
    poptorch.trainingModel(Model(), options)([x])
    assert torch.equal(x, expected)


class Buffered(nn.Module):
    def __init__(self, function, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("buff", torch.ones(2, dtype=dtype))
        self.function = function

    def forward(self, x):
        return self.function(self.buff, x)


def _use_then_add(buff, x):
    result = buff + x
    buff += 1
    return result


def test_output_uses_the_buffer_before_it_is_changed():
    module = Buffered(_use_then_add, torch.float16)
    model = wrap(module)
    assert model(torch.ones(2, dtype=torch.float16)).tolist() == [2, 2]
    model.copyWeightsToHost()
    assert module.buff.tolist() == [2, 2]
    assert module.buff.dtype is torch.float16


def _both(buff, x):
    buff += x
    x += buff


def test_input_and_buffer_in_one_forward():
    module = Buffered(_both)
    model = wrap(module)
    x = torch.ones(2)
    model(x)
    model(x)
    model.copyWeightsToHost()
    assert x.tolist() == [8, 8]
    assert module.buff.tolist() == [5, 5]


def _copies(buff, x):
    buff.copy_(x)
    buff.copy_(x * 2)


def _put(buff, x):
    buff[(torch.tensor([1]),)] = x[:1]


@pytest.mark.parametrize("function", [_copies, _put], ids=["copy_ twice", "index put"])
def test_buffer_ends_as_in_pytorch(function):
    module, native = Buffered(function), Buffered(function)
    x = torch.tensor([3.0, 4.0])
    model = wrap(module)
    model(x)
    model.copyWeightsToHost()
    native(x)
    assert torch.equal(module.buff, native.buff)


def test_integer_buffer_as_a_constant():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buf", torch.tensor([1, 2, 3]))

        def forward(self, x):
            return torch.sum(x + 1.0 + self.buf)

    model = wrap(Model())
    assert [model(torch.tensor([2.0])).item() for _ in range(2)] == [15, 15]


def test_removing_a_buffer_names_it_and_leaves_the_model_intact():
    class Model(Buffered):
        def forward(self, x):
            del self.buff
            return x

    module = Model(None)
    with pytest.raises(poptorch.Error, match="Buffer buff is removed from the model"):
        wrap(module)(torch.ones(2))
    assert torch.equal(module.buff, torch.ones(2))


def test_assigning_to_a_buffer_copies_and_another_shape_advises_copy_():
    class Model(Buffered):
        def forward(self, x):
            self.buff = x
            return x + 1

    module = Model(None)
    model = wrap(module)
    model(torch.full((2,), 3.0))
    model.copyWeightsToHost()
    assert module.buff.tolist() == [3, 3]
    with pytest.raises(poptorch.Error, match=r"(?s)Buffer buff is reassigned within the model.*copy_"):
        wrap(Model(None))(torch.ones(3))


@pytest.mark.parametrize("second", [lambda x: x, lambda x: x[1:3]], ids=["the same", "a part of it"])
def test_a_changed_input_that_shares_memory_with_another_is_refused(second):
    def add_then_use(x, y):
        x += 1
        return x.sum() + y.sum()

    executor, x = wrap(Apply(add_then_use)), torch.zeros(4, 3)
    executor.compile(x, torch.zeros_like(second(x)))
    with pytest.raises(poptorch.Error, match=r"shares memory with argument(?s:.*)fix: +pass \S+\.clone\(\)"):
        executor(x, second(x))
    assert not x.any()
    assert executor(x, second(x).clone()) == 12


def test_inputs_that_nobody_changes_may_share_memory():
    x = torch.ones(4, 3)
    assert wrap(Apply(lambda x, y: x.sum() + y.sum()))(x, x) == 24
