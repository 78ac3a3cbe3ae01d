"""Arguments as the original's tests pin them, beyond what `test_arguments.py` shows."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import poptorch


def wrap(module: nn.Module, **counts: int) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine("eager").deviceIterations(counts.get("D", 1))
    return poptorch.inferenceModel(module, options)


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([value]).to(dtype)


class Pair(nn.Module):
    def forward(self, pair):
        x, y = pair
        return x + y


class Forwarding(nn.Module):
    """Passes everything on to another module, whose signature it hides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_tuple_of_two_tensors(dtype):
    model = wrap(Pair())
    for _ in range(2):
        assert model((one(1, dtype), one(2, dtype))).item() == 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ((one(1, torch.int64), one(2, torch.int64)), "expected torch.float32 but got torch.int64"),
        ((torch.ones(2), torch.ones(2)), r"expected torch.Size\(\[1\]\) but got torch.Size\(\[2\]\)"),
    ],
    ids=["type", "shape"],
)
def test_other_type_or_shape_inside_a_tuple_needs_destroy(other, text):
    model = wrap(Pair())
    model((one(1), one(2)))
    with pytest.raises(poptorch.Error, match=text):
        model(other)
    model.destroy()
    for _ in range(2):
        assert torch.equal(model(other), (other[0] + other[1]).to(model(other).dtype))


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.float64], [torch.float16]])
def test_deeply_nested_arguments(dtypes):
    class Sum(nn.Module):
        def forward(self, a, b, c):
            (t1,), t2, (t3, (t4, t5), (t6, t7)) = a, b, c
            return t1 + t2 + t3 + t4 + t5 + t6 + t7

    t = [one(i + 1, dtypes[i % len(dtypes)]) for i in range(7)]
    model = wrap(Sum())
    for _ in range(2):
        assert model([t[0]], t[1], [t[2], (t[3], t[4]), [t[5], t[6]]]).item() == 28


def test_argument_that_forward_never_uses():
    class Ignore(nn.Module):
        def forward(self, x, unused):
            return x + 1

    assert wrap(Ignore())(one(1), (one(2), one(3))).item() == 2


def test_list_that_holds_a_dictionary_and_a_tensor():
    class Model(nn.Module):
        def forward(self, items):
            return items[0]["x"] + items[0]["y"] * items[1]

    model = wrap(Model())
    assert model([{"x": one(1), "y": one(2)}, one(3)]).item() == 7
    assert model([{"y": one(3), "x": one(1)}, one(3)]).item() == 10


class Record(OrderedDict):
    """A dictionary with attributes, as model libraries return them."""

    def __getattr__(self, name):
        return self[name]


@pytest.mark.parametrize("hidden", [False, True], ids=["directly", "forwarded"])
def test_dictionary_class_of_the_user_arrives_as_it_is(hidden):
    class Model(nn.Module):
        def forward(self, record):
            assert type(record) is Record
            return record.x - record.y

    model = wrap(Forwarding(Model()) if hidden else Model())
    for value in (1, 5):
        assert model(Record(x=one(value), y=one(1))).item() == value - 1


class Bag:
    """A class of the user that holds tensors."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        self.x, self.y = x, y


class BagParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.x
        if struct.y is not None:
            yield struct.y

    def reconstruct(self, original_structure, tensor_iterator):
        x = next(tensor_iterator)
        return Bag(x, None if original_structure.y is None else next(tensor_iterator))


@pytest.fixture
def _bags():
    poptorch.registerCustomArgParser(Bag, BagParser())
    yield
    poptorch.registerCustomArgParser(Bag, None)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.usefixtures("_bags")
def test_custom_type_in_and_out(d):
    class Double(nn.Module):
        def forward(self, bag):
            assert bag.x.shape[0] == 2
            return Bag(bag.x, bag.x * 2)

    x = torch.arange(4.0 * d).reshape(2 * d, 2)
    result = wrap(Double(), D=d)(Bag(x))
    assert type(result) is Bag
    assert torch.equal(result.x, x)
    assert torch.equal(result.y, x * 2)


@pytest.mark.usefixtures("_bags")
def test_custom_type_with_another_number_of_tensors_is_refused():
    class First(nn.Module):
        def forward(self, bag):
            return bag.x + 1

    model = wrap(First())
    model(Bag(one(1), one(2)))
    with pytest.raises(poptorch.Error, match="Length mismatch for bag: expected 2 tensors but got 1"):
        model(Bag(one(1)))


@pytest.mark.usefixtures("_bags")
def test_custom_type_in_and_dictionary_class_out():
    class ToRecord(nn.Module):
        def forward(self, bag):
            return Record(z=bag.x + 1, a=bag.y)

    result = wrap(ToRecord())(Bag(one(1), one(2)))
    assert type(result) is Record
    assert list(result) == ["z", "a"]
    assert (result.z.item(), result.a.item()) == (2, 2)


def test_parser_must_implement_the_interface_and_removing_none_is_fine():
    with pytest.raises(poptorch.Error, match="ICustomArgParser"):
        poptorch.registerCustomArgParser(Bag, object())
    poptorch.registerCustomArgParser(Bag, None)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m(None, one(2), None),
        lambda m: m(None, one(2)),
        lambda m: m(x=None, y=one(2), z=None),
        lambda m: m(one(1), None),
        lambda m: m(one(1), None, z=one(3)),
        lambda m: m(one(1), z=one(3), y=None),
    ],
)
def test_none_in_any_position(call):
    class Optional(nn.Module):
        def forward(self, x, y, z=None):
            return sum(t for t in (x, y, z) if t is not None)

    model = wrap(Optional())
    for _ in range(2):
        assert torch.equal(call(model), call(Optional()))


class Many(nn.Module):
    def forward(self, a, b, *c, y=None, z=None, t=None, u=3, v="op", **w):
        total = a * b + sum(c) * u + w["x"]
        for extra in (y, z, t, w.get("m")):
            total = total if extra is None else total + extra
        return total if v == "op" else total * 2


ARGS = (2, one(3), one(5), one(7), one(11))
NAMED = {"t": one(13), "x": one(17), "m": one(19), "z": one(23)}


@pytest.mark.parametrize("hidden", [False, True], ids=["directly", "forwarded"])
def test_every_kind_of_parameter(hidden):
    model = wrap(Forwarding(Many()) if hidden else Many())
    assert torch.equal(model(*ARGS, **NAMED), Many()(*ARGS, **NAMED))
    without_z = r"Missing arguments: z\." if hidden else "Type mismatch for z"
    with pytest.raises(poptorch.Error, match=without_z):
        model(*ARGS, **{name: value for name, value in NAMED.items() if name != "z"})
    with pytest.raises(poptorch.Error, match=r"Missing arguments: m\."):
        model(*ARGS, **{name: value for name, value in NAMED.items() if name != "m"})


@pytest.mark.parametrize("hidden", [False, True], ids=["directly", "forwarded"])
def test_every_kind_of_parameter_with_other_constants_after_destroy(hidden):
    model = wrap(Forwarding(Many()) if hidden else Many())
    model(*ARGS, **NAMED)
    model.destroy()
    constants = {"u": 5, "v": "foobar"}
    assert torch.equal(model(*ARGS, **NAMED, **constants), Many()(*ARGS, **NAMED, **constants))
    with pytest.raises(poptorch.Error, match="mismatch for u: expected 5 but got 3"):
        model(*ARGS, **NAMED, u=3, v="foobar")
    for count in (4, 2):
        text = f"Number of positional arguments mismatch: expected 5 arguments but got {count}"
        with pytest.raises(poptorch.Error, match=text):
            model(*ARGS[:count], **NAMED, **constants)


def test_array_as_a_constant():
    class Shift(nn.Module):
        def forward(self, x, shift):
            return x + float(shift.sum())

    model = wrap(Shift())
    for _ in range(2):
        assert model(one(1), np.array([2.0, 3.0])).item() == 6
    for other in ([2.0, 4.0], [2.0, 3.0, 0.0]):
        with pytest.raises(poptorch.Error, match="Value mismatch for shift"):
            model(one(1), np.array(other))


@pytest.mark.parametrize("module", [Pair(), nn.Linear(2, 2)])
def test_requires_grad_inputs_are_accepted(module):
    x = torch.ones(1, 2, requires_grad=True)
    argument = (x, x) if isinstance(module, Pair) else x
    torch.testing.assert_close(wrap(module)(argument), module(argument).detach())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_type_that_a_device_does_not_have(dtype):
    with pytest.raises(poptorch.Error, match=f"argument input is a tensor of {dtype}"):
        wrap(nn.Identity())(torch.ones(1, dtype=dtype))


@pytest.mark.parametrize(
    "index", [lambda: torch.LongTensor([1, 0]), lambda: torch.tensor([1, 0])], ids=["host", "factory"]
)
def test_host_tensor_as_an_index_is_a_constant(index):
    class Select(nn.Module):
        def forward(self, x):
            return x.index_select(0, index())

    model = wrap(Select())
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])):
        assert torch.equal(model(x), x.flip(0))
