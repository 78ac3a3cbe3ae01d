"""Arguments: how a call is bound to `forward`, and what later calls may not change."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import poptorch


def wrap(module: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, poptorch.Options().engine("eager"))


def one(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


ONE, ZERO = one(1), one(0)


class Weighted(nn.Module):
    def forward(self, a, b, c=ONE, d=ZERO):
        return a * c + b * d


class Many(nn.Module):
    """Every kind of parameter that Python has."""

    def forward(self, a, b, *c, y=None, z=None, t=None, u=3, v="op", **w):
        total = a * b + sum(c) * u
        for extra in (y, z, t, *w.values()):
            if extra is not None:
                total = total + extra
        return total * 2 if v == "op" else total


class Add(nn.Module):
    def forward(self, x, y):
        return x + y


class First(nn.Module):
    """Returns the sum of whatever tensors its one argument holds."""

    def forward(self, value):
        items = value.values() if isinstance(value, dict) else value
        return sum(items)


class Constant(nn.Module):
    def forward(self, x, scale=2, shift=None):
        out = x * scale
        return out if shift is None else out + shift


# ---- binding


def test_defaults_fill_in_and_are_ordinary_inputs():
    model = wrap(Weighted())
    assert model(one(1), one(2)).item() == 1
    assert model(one(1), one(2), d=one(4)).item() == 9
    assert model(d=one(4), b=one(2), a=one(1)).item() == 9


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m(one(3)),
        lambda m: m(one(3), 4),
        lambda m: m(one(3), 2, one(5)),
        lambda m: m(one(3), shift=one(5)),
        lambda m: m(one(3), scale=7, shift=None),
    ],
)
def test_constants_and_optional_tensors(call):
    assert torch.equal(call(wrap(Constant())), call(Constant()))


def test_all_kinds_of_parameters():
    arguments = (2, one(3), one(5), one(7), one(11))
    named = {"t": one(13), "x": one(17), "m": one(19), "z": one(23)}
    model = wrap(Many())
    for _ in range(2):
        assert torch.equal(model(*arguments, **named), Many()(*arguments, **named))


def test_missing_argument():
    with pytest.raises(poptorch.Error, match="Mandatory parameter b missing"):
        wrap(Weighted())(one(1))


def test_missing_argument_of_an_inner_forward_is_pythons_own_error():
    class Forwarding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Add()

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    with pytest.raises(TypeError, match="y"):
        wrap(Forwarding())(one(1))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m(one(1), one(2), one(3)), "3 positional"),
        (lambda m: m(one(1), z=one(2)), "z"),
        (lambda m: m(one(1), one(2), x=one(3)), "x"),
    ],
    ids=["too many", "unknown keyword", "given twice"],
)
def test_wrong_arguments_are_assertion_errors(call, text):
    with pytest.raises(AssertionError, match=text):
        call(wrap(Add()))


@pytest.mark.parametrize("bad", ["too many", "unknown"])
def test_wrong_arguments_of_a_later_call_too(bad):
    model = wrap(Add())
    model(one(1), one(2))
    with pytest.raises(AssertionError):
        model(one(1), one(2), one(3)) if bad == "too many" else model(one(1), z=one(3))


def test_zero_sized_tensor():
    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported \(Got shape \[0, 2, 5, 5\]\)"):
        wrap(Constant())(torch.randn(0, 2, 5, 5))


NO_MEMORY_OF_THE_HOST = {
    "sparse": (lambda x: x.to_sparse(), "sparse_coo tensor, but a compiled program works on dense ones"),
    "of oneDNN": (lambda x: x.to_mkldnn(), "_mkldnn tensor, but a compiled program works on dense ones"),
    "nested": (
        lambda x: torch.nested.as_nested_tensor(list(x)),
        "nested tensor, but a compiled program works on dense",
    ),
    "without numbers": (lambda x: x.to("meta"), "on the device meta, but a compiled program takes tensors of the host"),
}


@pytest.mark.inductor
@pytest.mark.parametrize(("make", "text"), NO_MEMORY_OF_THE_HOST.values(), ids=NO_MEMORY_OF_THE_HOST)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_numbers_side_by_side_in_memory(make, text, engine):
    """Native code would read memory that is not there, and the process would end."""
    model, x = poptorch.inferenceModel(nn.ReLU(), poptorch.Options().engine(engine)), torch.ones(2, 4)
    for _ in range(2):
        for call in (lambda x: model(x), lambda x: model(input=x)):
            with pytest.raises(poptorch.Error, match=text):
                call(make(x))
        assert torch.equal(model(x), x)


def test_zero_dimensional_tensor():
    assert wrap(Add())(torch.tensor(1.0), torch.tensor(2.0)).item() == 3


def test_model_without_inputs():
    class Nothing(nn.Module):
        def forward(self):
            return None

    model = wrap(Nothing())
    assert model() is None
    assert model() is None


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, ::2], lambda x: x.t(), lambda x: x[:1].expand(4, 6)],
    ids=["sliced", "transposed", "expanded"],
)
def test_tensors_that_are_not_contiguous(view, caplog):
    x = view(torch.arange(24.0).reshape(4, 6))
    model = wrap(Constant())
    for _ in range(2):
        assert torch.equal(model(x), x * 2)
    assert sum("contiguous" in record.message for record in caplog.records) <= 1


def test_input_that_requires_a_gradient_is_detached():
    x = one(1).requires_grad_()
    assert wrap(Constant())(x).requires_grad is False


# ---- nested values


def test_nested_arguments_of_every_container():
    class Sum(nn.Module):
        def forward(self, a, b, c):
            return a[0] + b + c[0] + c[1][0] + c[1][1] + c[2][0] + c[2][1]

    def arguments(offset):
        t = [one(n + offset) for n in range(1, 8)]
        return [t[0]], t[1], [t[2], (t[3], t[4]), [t[5], t[6]]]

    model = wrap(Sum())
    assert model(*arguments(0)).item() == 28
    assert model(*arguments(1)).item() == 35


@dataclass
class Sample:
    image: torch.Tensor
    weights: dict[str, torch.Tensor]
    kind: str = "plain"


class Weigh(nn.Module):
    def forward(self, sample):
        return sample.image * sample.weights["left"] + len(sample.kind)


def test_argument_may_be_a_dataclass():
    model = wrap(Weigh())
    assert model(Sample(one(2), {"left": one(3)})).item() == 11
    assert model(Sample(one(4), {"left": one(5)})).item() == 25
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for sample.image"):
        model(Sample(torch.ones(3), {"left": one(5)}))
    with pytest.raises(poptorch.Error, match=r"Value mismatch for sample.kind: expected 'plain' but got 'other'"):
        model(Sample(one(2), {"left": one(3)}, "other"))


def test_argument_of_an_unknown_type_with_tensors_is_refused():
    with pytest.raises(poptorch.Error, match=r"holds tensors(.|\n)*registerCustomArgParser\(SimpleNamespace, ...\)"):
        wrap(Weigh())(SimpleNamespace(image=one(2), weights={"left": one(3)}, kind=""))


def test_dictionary_may_come_in_another_order():
    class Subtract(nn.Module):
        def forward(self, d):
            return d["x"] - d["y"]

    model = wrap(Subtract())
    assert model({"x": one(5), "y": one(3)}).item() == 2
    assert model({"y": one(3), "x": one(9)}).item() == 6


def test_dictionary_subclass_arrives_with_its_own_type():
    seen = []

    class Record(OrderedDict):
        pass

    class Model(nn.Module):
        def forward(self, record):
            seen.append(type(record))
            return record["x"] + 1

    assert wrap(Model())(Record(x=one(1))).item() == 2
    assert set(seen) == {Record}


# ---- what later calls may not change

COMPILED = {
    "number of arguments": (
        Many(),
        lambda m: m(one(1), one(2), one(3), one(4), one(5)),
        lambda m: m(one(1), one(2), one(3), one(4)),
        "Number of positional arguments mismatch: expected 5 arguments but got 4",
    ),
    "constant instead of tensor": (
        Add(),
        lambda m: m(one(1), one(2)),
        lambda m: m(one(1), 2),
        "Type mismatch for y: expected .* but got int",
    ),
    "None instead of tensor": (
        Many(),
        lambda m: m(one(1), one(2), one(1), z=one(3)),
        lambda m: m(one(1), one(2), one(1)),
        "Type mismatch for z",
    ),
    "list instead of tuple": (
        First(),
        lambda m: m((one(1), one(2))),
        lambda m: m([one(1), one(2)]),
        "Type mismatch for value: expected tuple but got list",
    ),
    "length": (
        First(),
        lambda m: m((one(1), one(2))),
        lambda m: m((one(1), one(2), one(3))),
        "Length mismatch",
    ),
    "missing key": (
        First(),
        lambda m: m({"x": one(1), "y": one(2)}),
        lambda m: m({"y": one(2)}),
        r"Missing arguments: x\.",
    ),
    "unexpected key": (
        First(),
        lambda m: m({"x": one(1)}),
        lambda m: m({"x": one(1), "z": one(2)}),
        r"Unexpected arguments: z\.",
    ),
    "several keys are sorted": (
        First(),
        lambda m: m({"c": one(1), "b": one(1), "a": one(1)}),
        lambda m: m({"b": one(1)}),
        r"Missing arguments: a, c\.",
    ),
    "missing named argument": (
        Many(),
        lambda m: m(one(1), one(2), one(1), m=one(3)),
        lambda m: m(one(1), one(2), one(1)),
        r"Missing arguments: m\.",
    ),
    "dtype": (
        Add(),
        lambda m: m(one(1), one(2)),
        lambda m: m(torch.tensor([1]), torch.tensor([2])),
        "expected torch.float32 but got torch.int64",
    ),
    "shape": (
        Add(),
        lambda m: m(one(1), one(2)),
        lambda m: m(torch.ones(2), torch.ones(2)),
        r"expected torch.Size\(\[1\]\) but got torch.Size\(\[2\]\)",
    ),
    "value of a constant": (
        Many(),
        lambda m: m(one(1), one(2), one(1), u=5),
        lambda m: m(one(1), one(2), one(1), u=3),
        "Value mismatch for u: expected 5 but got 3",
    ),
    "nested position": (
        First(),
        lambda m: m([one(1), one(2)]),
        lambda m: m([one(1), torch.ones(2)]),
        r"value\[1\]",
    ),
    "nested key": (
        First(),
        lambda m: m({"k": one(1)}),
        lambda m: m({"k": torch.ones(2)}),
        r"value\[k\]",
    ),
    "variable position": (
        Many(),
        lambda m: m(one(1), one(2), one(3), one(4), one(5)),
        lambda m: m(one(1), one(2), one(3), one(4), torch.ones(2)),
        r"\*c\[2\]",
    ),
}


@pytest.mark.parametrize("case", COMPILED)
def test_later_call_must_look_like_the_first(case):
    module, first, later, text = COMPILED[case]
    model = wrap(module)
    expected = first(model)
    with pytest.raises(poptorch.Error, match=text) as caught:
        later(model)
    assert "destroy()" in str(caught.value)
    assert torch.equal(first(model), expected)


@pytest.mark.parametrize("case", ["dtype", "shape", "length", "value of a constant"])
def test_after_destroy_the_other_call_compiles(case):
    module, first, later, _ = COMPILED[case]
    model = wrap(module)
    first(model)
    model.destroy()
    native = later(module)
    for _ in range(2):
        assert torch.equal(later(model), native.to(torch.int32) if native.dtype is torch.int64 else native)


def test_float16_after_float32_is_refused_although_it_would_broadcast():
    model = wrap(Add())
    model(one(1), one(2))
    with pytest.raises(poptorch.Error, match=r"expected torch\.float32 but got torch\.float16"):
        model(one(1), one(2).half())


def test_rows_that_cannot_be_split_show_the_arithmetic():
    options = poptorch.Options().engine("eager").deviceIterations(4).replicationFactor(2)
    model = poptorch.inferenceModel(Constant(), options)
    with pytest.raises(AssertionError) as caught:
        model(torch.ones(12, 3))
    text = str(caught.value)
    assert "[12, 3]" in text
    assert all(number in text for number in ("4", "2", "8"))
    assert not model.isCompiled()


def test_argument_may_have_the_name_of_a_parameter():
    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, weight):
            return poptorch.identity_loss(self.weight * weight, "sum")

    model = Product()
    options = poptorch.Options().engine("eager")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    assert training(torch.tensor([1.0, 2.0, 3.0])).item() == 6
    assert model.weight.tolist() == [0.0, -1.0, -2.0]
