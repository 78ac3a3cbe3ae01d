"""`poptorch.custom_op`: operations of the user's own, in inference and training, with attributes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch


class Applies(nn.Module):
    """A model that is one custom op of the domain `test.poptorch`."""

    def __init__(self, name, attributes=None, count=1, domain="test.poptorch"):
        super().__init__()
        self.call = (name, domain, 1)
        self.attributes, self.count = attributes, count

    def forward(self, *inputs):
        outputs = poptorch.custom_op(inputs, *self.call, [inputs[0]] * self.count, self.attributes)
        assert type(outputs) is list
        return outputs[0] if self.count == 1 else outputs


def apply(name, *inputs, engine="eager", count=1, domain="test.poptorch", **attributes):
    model = Applies(name, attributes, count, domain)
    return poptorch.inferenceModel(model, poptorch.Options().engine(engine))(*inputs)


def cube(inputs, attributes):
    x, bias = inputs
    return x**3 + bias, x**3


def numpy_cube(inputs, attributes):
    """The same, in a way that autograd cannot follow."""
    x, bias = inputs
    cubed = torch.from_numpy(x.numpy() ** 3)
    return cubed + bias, cubed


def cube_backward(gradients, inputs, outputs, attributes):
    x, bias = inputs
    torch.testing.assert_close(outputs[1], x**3)
    return (gradients[0] + gradients[1]) * 3 * x**2, gradients[0].sum_to_size(bias.shape)


def reduce(values, how):
    return values.mean() if how == "mean" else values.sum()


@pytest.fixture(scope="module", autouse=True)
def ops():
    """The operations of these tests."""
    poptorch.registerCustomOp("Cube", "com.acme", 1, cube)
    poptorch.registerCustomOp("NumpyCube", "com.acme", 1, numpy_cube, cube_backward)
    poptorch.registerCustomOp("TracedCube", "com.acme", 1, cube, traced=True)
    poptorch.registerCustomOp("TracedCubeWithBackward", "com.acme", 1, cube, cube_backward, traced=True)
    python = {
        "LeakyRelu": lambda i, a: torch.where(i[0] < 0, i[0] * a.get("alpha", 0.01), i[0]),
        "AddScalarFloat": lambda i, a: i[0] + a["scalar"],
        "AddScalarInt": lambda i, a: i[0] + a["scalar"],
        "AddScalarVecFloat": lambda i, a: i[0] + torch.tensor(a["vec"]),
        "AddScalarVecInt": lambda i, a: i[0] + torch.tensor(a["vec"], dtype=torch.int32),
        "AddVecScalarMulFloat": lambda i, a: (i[0] + torch.tensor(a["vec"])) * a["scalar"],
        "ReduceOp": lambda i, a: reduce(i[0], a["reduction"]),
        "ThreeReduceOp": lambda i, a: [reduce(x, how) for x, how in zip(i, a["reductions"], strict=True)],
        "ManyAttributeOp": lambda i, a: torch.tensor(float(a == MANY)),
        "Types": lambda i, a: torch.tensor([float(type(a["value"]) is int)]),
    }
    for name, function in python.items():
        poptorch.registerCustomOp(name, "test.poptorch", 1, function)


MANY = {
    "float_one": 1.0,
    "float_minus_two": -2.0,
    "int_zero": 0,
    "int_large": 2**63 - 1,
    "float_list": [-0.5, 2.5],
    "int_list": [-5, 0, 5],
    "text": "quotes \" and ' and \\ and %27",
    "texts": ["foo", "bar", ""],
}


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["Cube", "NumpyCube", "TracedCube"])
def test_cube(engine, name):
    x, bias = torch.full((1,), 2.0), torch.full((1,), 4.0)
    assert [y.item() for y in apply(name, x, bias, engine=engine, count=2, domain="com.acme")] == [12, 8]


class Trained(nn.Module):
    """Linear layers around a cube, which is computed by PyTorch on the CPU."""

    def __init__(self, name="Cube", size=6):
        super().__init__()
        self.name, self.before, self.after = name, nn.Linear(size, size), nn.Linear(size, size)
        self.bias = nn.Parameter(torch.ones(size))

    def forward(self, x, label):
        hidden = self.before(x)
        if poptorch.isRunningOnIpu():
            hidden, other = poptorch.custom_op([hidden, self.bias], self.name, "com.acme", 1, [x, x])
        else:
            hidden, other = cube([hidden, self.bias], {})
        scores = self.after(hidden + 0.5 * other)
        return scores, nn.functional.cross_entropy(scores, label)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["Cube", "NumpyCube", "TracedCube", "TracedCubeWithBackward"])
def test_a_step_equals_that_of_pytorch(engine, name):
    torch.manual_seed(0)
    model = Trained(name)
    plain = copy.deepcopy(model)
    options = poptorch.Options().engine(engine).replicationFactor(2).deviceIterations(2)
    options.Training.gradientAccumulation(2)
    options.outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    x, label = torch.randn(16, 6), torch.randint(6, (16,))
    _, losses = training(x, label)

    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    batches = list(zip(x.split(2), label.split(2), strict=True))
    for step in (batches[:4], batches[4:]):
        found = [plain(*batch)[1] for batch in step]
        optimizer.zero_grad()
        torch.stack(found).mean().backward()
        optimizer.step()
        expected += [loss.detach() for loss in found]
    torch.testing.assert_close(losses.sort().values, torch.stack(expected).sort().values)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["Cube", "NumpyCube", "TracedCubeWithBackward"])
def test_activation_checkpointing_computes_the_op_again(name):
    class Checkpointed(Trained):
        def forward(self, x, label):
            return checkpoint(super().forward, x, label, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed(name)
    plain = copy.deepcopy(model)
    x, label = torch.randn(4, 6), torch.randint(6, (4,))
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(x, label)
    plain(x, label)[1].backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_training_through_cube_finds_the_class():
    torch.manual_seed(0)
    model = Trained(size=100)
    before = copy.deepcopy(model.state_dict())
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    x, label = torch.rand(1, 100), torch.tensor([42])
    for _ in range(100):
        scores, _ = training(x, label)
    assert scores.argmax().item() == 42
    assert not any(torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.inductor
def test_leaky_relu(engine):
    x = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
    found = apply("LeakyRelu", x, engine=engine, alpha=0.02)
    torch.testing.assert_close(found, torch.tensor([-0.02, -0.01, 0.0, 0.5, 1.0]))


def test_numbers_as_attributes():
    assert apply("AddScalarFloat", torch.tensor([5.0]), scalar=3.5).item() == 8.5
    found = apply("AddScalarInt", torch.tensor([5], dtype=torch.int32), scalar=3)
    assert (found.item(), found.dtype) == (8, torch.int32)


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_as_attributes(kind):
    x = torch.tensor([3.0, 4.0, 5.0])
    assert apply("AddScalarVecFloat", x, vec=kind((1.0, 2.0, 3.0))).tolist() == [4, 6, 8]
    assert apply("AddScalarVecInt", x.int(), vec=kind((1, 2, 3))).tolist() == [4, 6, 8]
    assert apply("AddVecScalarMulFloat", x, vec=kind((1.0, 2.0, 3.0)), scalar=2.0).tolist() == [8, 12, 16]


def test_two_ops_have_their_own_attributes():
    class Two(nn.Module):
        def forward(self, x):
            for scalar in (3.0, 2.0):
                (x,) = poptorch.custom_op([x], "AddScalarFloat", "test.poptorch", 1, [x], {"scalar": scalar})
            return x

    assert poptorch.inferenceModel(Two())(torch.tensor([5.0])).item() == 10


@pytest.mark.parametrize(("value", "direction"), [(-1.79769e308, "low"), (1.79769e308, "high"), (3.5e38, "high")])
@pytest.mark.parametrize("is_list", [False, True])
def test_floats_have_to_fit_float32(value, direction, is_list):
    shown = f"{value:g}".replace("+", r"\+")
    name, given = ("vec", [1.0, value]) if is_list else ("scalar", value)
    with pytest.raises(poptorch.Error, match=f"{shown}, which is too {direction} for a float attribute"):
        apply("AddScalarFloat", torch.tensor([5.0]), **{name: given})


def test_integers_have_to_fit_64_bits():
    with pytest.raises(poptorch.Error, match="9223372036854775808, which is too high for a 64-bit integer attribute"):
        apply("AddScalarInt", torch.tensor([5]), scalar=2**63)


def test_texts_as_attributes():
    x = torch.tensor([5.0, 6.0, 7.0])
    assert apply("ReduceOp", x, reduction="mean").item() == 6
    total = apply("ReduceOp", x, reduction="sum")
    assert (total.item(), total.shape) == (18, ())  # the op decides about the shape, not the example


def test_lists_of_texts_as_attributes():
    inputs = [torch.tensor(values) for values in ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [3.0, 4.0, 5.0])]
    found = apply("ThreeReduceOp", *inputs, count=3, reductions=["mean", "sum", "mean"])
    assert [y.item() for y in found] == [2, 9, 4]


@pytest.mark.parametrize("attributes", [{"text": "caf\u00e9"}, {"texts": ["a", "\u00e9"]}, {"caf\u00e9": 1}])
def test_texts_are_ascii(attributes):
    with pytest.raises(ValueError, match=r"contains non-ASCII characters."):
        apply("ReduceOp", torch.ones(1), **attributes)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({1: 2.0}, "the name of an attribute is a text, not 1"),
        ({"a": None}, "attribute 'a' is None of type NoneType"),
        ({"a": torch.ones(1)}, "of type Tensor"),
        ({"a": [1, 2.0]}, r"mixes float and int: \[1, 2.0\]"),
        ({"a": ["x", 1]}, "mixes int and str"),
        ({"a": [[1]]}, "of type list"),
    ],
)
def test_other_attributes_are_refused(attributes, text):
    x = torch.ones(1)
    with pytest.raises(ValueError, match=text):
        poptorch.custom_op([x], "ReduceOp", "test.poptorch", 1, [x], attributes)


@pytest.mark.inductor
def test_all_kinds_of_attributes_arrive(engine):
    assert apply("ManyAttributeOp", torch.zeros(1), engine=engine, **MANY).item() == 1


@pytest.mark.parametrize("order", list(itertools.permutations(MANY))[::8000])
def test_attributes_arrive_in_any_order(order):
    assert apply("ManyAttributeOp", torch.zeros(1), **{name: MANY[name] for name in order}).item() == 1


@pytest.mark.parametrize("name", MANY)
def test_one_wrong_attribute_is_noticed(name):
    value = MANY[name]
    wrong = value[:-1] if isinstance(value, (list, str)) else value - 1
    assert apply("ManyAttributeOp", torch.zeros(1), **{**MANY, name: wrong}).item() == 0


def test_an_integer_is_not_a_float():
    assert apply("Types", torch.zeros(1), value=1).item() == 1
    assert apply("Types", torch.zeros(1), value=1.0).item() == 0


def test_on_the_cpu_outputs_are_zeros_like_the_examples():
    outputs = poptorch.custom_op([torch.ones(2)], "Unknown", "nowhere", 1, [torch.ones(3), torch.ones(1).half()])
    assert type(outputs) is list
    torch.testing.assert_close(outputs, [torch.zeros(3), torch.zeros(1).half()])


def test_an_unknown_op_names_those_there_are():
    with pytest.raises(poptorch.Error) as caught:
        apply("Cubed", torch.ones(1), domain="com.acme")
    text = str(caught.value)
    assert "there is no custom op com.acme.Cubed version 1; did you mean 'com.acme.Cube version 1'?" in text
    assert "com.acme.NumpyCube version 1" in text
    assert "ai.graphcore.L1Distance version 1" in text
    assert "torch.ops.com_acme" in text


def test_another_version_is_another_op():
    class Second(nn.Module):
        def forward(self, x):
            return poptorch.custom_op([x], "Cube", "com.acme", 2, [x])[0]

    with pytest.raises(poptorch.Error, match=r"no custom op com.acme.Cube version 2"):
        poptorch.inferenceModel(Second())(torch.ones(1))


def test_the_number_of_outputs_is_that_of_the_examples():
    with pytest.raises(poptorch.Error, match="Cube version 1 has 2 outputs, but 1 example_outputs"):
        apply("Cube", torch.ones(1), torch.ones(1), domain="com.acme")


@pytest.mark.parametrize(
    ("inputs", "examples", "text"),
    [
        (torch.ones(1), [torch.ones(1)], "inputs of custom_op is"),
        ([torch.ones(1), 3], [torch.ones(1)], "inputs of custom_op is"),
        ([torch.ones(1)], torch.ones(1), "example_outputs of custom_op is"),
        ([torch.ones(1)], [], "one output at least"),
    ],
)
def test_inputs_and_examples_are_lists_of_tensors(inputs, examples, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.custom_op(inputs, "Cube", "com.acme", 1, examples)


@pytest.mark.parametrize("described", [(2,), [(2,)], torch.empty(2), [torch.empty(2)]])
def test_a_shape_function_saves_the_call_with_zeros(described):
    given = []

    def forward(inputs, attributes):
        given.append(inputs[0].tolist())
        return inputs[0][:2] * 2

    poptorch.registerCustomOp("First", "test.shape", 1, forward, shape=lambda inputs, attributes: described)
    found = apply("First", torch.tensor([1.0, 2.0, 3.0]), domain="test.shape")
    assert found.tolist() == [2, 4]
    assert given == [[1, 2, 3]]


def test_a_shape_function_describes_every_output():
    poptorch.registerCustomOp("Wrong", "test.shape", 1, cube, shape=lambda inputs, attributes: [(1,)])
    with pytest.raises(poptorch.Error, match="describes 1 outputs, but there are 2 example_outputs"):
        apply("Wrong", torch.ones(1), torch.ones(1), count=2, domain="test.shape")


def test_a_backward_function_gives_a_gradient_for_each_input():
    poptorch.registerCustomOp("Lazy", "com.acme", 1, cube, lambda gradients, *rest: gradients[0])
    model = Trained("Lazy")
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="returned 1 gradients for 2 inputs"):
        training(torch.randn(2, 6), torch.tensor([0, 1]))


def test_none_is_a_gradient_of_zeros():
    poptorch.registerCustomOp("Half", "com.acme", 1, cube, lambda gradients, *rest: [gradients[0], None])
    model = Trained("Half")
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.randn(2, 6), torch.tensor([0, 1]))
    assert model.bias.tolist() == [1] * 6
    assert model.before.weight.grad is None


@pytest.mark.inductor
def test_weights_stay_whole_if_the_op_fails(engine):
    def fail(gradients, inputs, outputs, attributes):
        if inputs[0].isnan().any():
            raise ZeroDivisionError("not this batch")
        return cube_backward(gradients, inputs, outputs, attributes)

    poptorch.registerCustomOp("Fails", "com.acme", 1, cube, fail)
    model = Trained("Fails")
    options = poptorch.Options().engine(engine)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    label = torch.tensor([0, 1])
    training(torch.randn(2, 6), label)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError, match="not this batch"):
        training(torch.full((2, 6), float("nan")), label)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    training(torch.randn(2, 6), label)
    assert not torch.equal(model.bias, before["bias"])


def test_an_op_without_derivative_says_that_it_stops_training(caplog):
    poptorch.registerCustomOp("Constant", "com.acme", 1, lambda inputs, attributes: [x.detach() for x in inputs])
    model = Trained("Constant")
    before = model.before.weight.detach().clone()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level("WARNING", logger="poptorch"):
        training(torch.randn(2, 6), torch.tensor([0, 1]))
    assert "com.acme.Constant version 1 has no derivative" in caplog.text
    assert torch.equal(model.before.weight, before)


def test_integers_need_no_gradient():
    poptorch.registerCustomOp("Pick", "com.acme", 1, lambda inputs, attributes: [inputs[0][inputs[1]], inputs[1] + 1])

    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(4.0))

        def forward(self, index):
            chosen, other = poptorch.custom_op([self.table, index], "Pick", "com.acme", 1, [index, index])
            return other, poptorch.identity_loss(chosen, "sum")

    model = Picks()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    other, loss = training(torch.tensor([1, 1, 3]))
    assert (other.tolist(), loss.item()) == ([2, 2, 4], 5)
    assert model.table.tolist() == [0, -1, 2, 2]


@pytest.mark.parametrize("functions", [(3, None, None), (cube, 3, None), (cube, None, "text")])
def test_only_functions_are_registered(functions):
    with pytest.raises(poptorch.Error, match="registerCustomOp takes a function as"):
        poptorch.registerCustomOp("Wrong", "test.poptorch", 1, *functions)
