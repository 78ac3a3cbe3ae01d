"""Hints about memory: results do not change, the notes are where passes look for them, and memory is saved."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from measuring import peak_nbytes
from models import Apply
from poptorch.ir import hint_of

Mode = poptorch.MatMulSerializationMode


def infer(function, *args):
    """The result of a compiled function, checked against the same on the host, and the executor."""
    module = function if isinstance(function, nn.Module) else Apply(function)
    model = poptorch.inferenceModel(module)
    result = model(*args)
    torch.testing.assert_close(result, module(*args), rtol=1e-4, atol=1e-4)
    return result, model


def hints(model, kind):
    """The hints of one kind in the program that a model runs, by op."""
    nodes = model._executable.step.graph.ops.nodes
    found = [(str(node.target), hint_of(node, kind)) for node in nodes if node.op == "call_function"]
    assert not any("poptorch.hint" in target for target, _ in found)
    return {target: value for target, value in found if value is not None}


# ---- set_available_memory


def test_the_memory_of_a_product_that_is_the_last_op():
    _, model = infer(lambda x, y: poptorch.set_available_memory(x @ y, 0.3), torch.randn(2, 3), torch.randn(3, 4))
    assert hints(model, "available_memory") == {"aten.mm.default": 0.3}
    assert "[available_memory 0.3]" in str(model._executable.step.graph)


def test_the_memory_of_a_layer_is_that_of_its_product():
    hint = Apply(lambda x: poptorch.set_available_memory(x, 0.3))
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3), hint)
    _, model = infer(layers, torch.randn(2, 1, 4, 4))
    assert hints(model, "available_memory") == {"aten.addmm.default": 0.3}


def test_a_bias_that_is_added_apart_is_looked_through():
    def forward(x, y, bias):
        return poptorch.set_available_memory(torch.relu(x @ y + bias), 0.2)

    _, model = infer(forward, torch.randn(2, 3), torch.randn(3, 4), torch.randn(4))
    assert hints(model, "available_memory") == {"aten.mm.default": 0.2}


def test_the_memory_of_a_scatter():
    def forward(x, index, source):
        return poptorch.set_available_memory(x.scatter_add(0, index, source), 0.9)

    _, model = infer(forward, torch.zeros(3), torch.tensor([0, 0, 2]), torch.ones(3))
    assert hints(model, "available_memory") == {"aten.scatter_add.default": 0.9}


def test_without_a_product_nearby_it_is_an_identity():
    def forward(x, y):
        return poptorch.set_available_memory(((x @ y).exp() + 1).sin() * 2, 0.9)

    _, model = infer(forward, torch.randn(2, 3), torch.randn(3, 4))
    assert hints(model, "available_memory") == {}


def test_the_backward_products_have_the_memory_of_the_forward_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x, target):
            return F.mse_loss(poptorch.set_available_memory(self.fc(x), 0.3), target)

    module = Model()
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    training(torch.randn(2, 3), torch.randn(2, 2))
    assert hints(training, "available_memory") == {"aten.addmm.default": 0.3, "aten.mm.default": 0.3}


def test_available_memory_takes_a_tensor():
    with pytest.raises(poptorch.Error, match="takes a tensor, not 1"):
        poptorch.set_available_memory(1, 0.5)


def test_hints_on_inputs_that_are_returned_leave_results_with_memory_of_their_own():
    x = torch.ones(2)
    result, _ = infer(lambda x: poptorch.recomputationCheckpoint(poptorch.set_available_memory(x, 0.1)), x)
    assert result.data_ptr() != x.data_ptr()


# ---- serializedMatMul


@pytest.mark.parametrize("keep_precision", [False, True])
@pytest.mark.parametrize("factor", [2, 5, 10])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pieces_give_the_same_product(mode, factor, keep_precision, dtype):
    torch.manual_seed(0)
    lhs, rhs = torch.randn(1, 10, 200), torch.randn(200, 50 if mode is Mode.OutputChannels else 45)
    module = Apply(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, keep_precision))
    result = poptorch.inferenceModel(module)(lhs.to(dtype), rhs.to(dtype))
    expected = lhs @ rhs
    assert result.dtype == dtype
    tolerance = {"rtol": 0.01, "atol": 0.05} if dtype is torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(result.float(), expected, **tolerance)


@pytest.mark.parametrize(
    ("mode", "factor"), [(Mode.InputChannels, 2), (Mode.ReducingDim, 2), (Mode.OutputChannels, 4), (Mode.Disabled, 0)]
)
def test_small_products(mode, factor):
    infer(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, True), torch.randn(6, 2), torch.randn(2, 4))


SHAPES = [((8,), (8, 4)), ((6, 8), (8,)), ((8,), (8,)), ((3, 6, 8), (3, 8, 4)), ((2, 1, 6, 8), (5, 8, 4))]


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_every_shape_that_matmul_takes(left, right):
    infer(lambda x, y: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 2), torch.randn(left), torch.randn(right))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (1, 0)])
def test_products_in_pieces_under_vmap(mapped):
    def forward(x, y):
        return torch.vmap(lambda x, y: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 2), in_dims=mapped)(x, y)

    infer(forward, torch.randn(3, 3, 4), torch.randn((4, 2) if mapped[1] is None else (3, 4, 2)))


def test_sums_of_pieces_can_be_kept_in_float32():
    """2048 + 1 is 2048 in float16, so eight ones in eight pieces are lost if every sum is rounded."""
    lhs = torch.tensor([[2048.0, 1, 1, 1, 1, 1, 1, 1, 1, 0]]).half()
    results = {
        keep: poptorch.inferenceModel(
            Apply(lambda x, y, keep=keep: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 10, keep))
        )(lhs, torch.ones(10, 1).half()).item()
        for keep in (False, True)
    }
    assert results == {False: 2048.0, True: 2056.0}


class Projection(nn.Module):
    """A product with weights, of a batch whose channels are not the last dimension, or are if not `turned`."""

    def __init__(self, mode, factor, *, turned=True, scaled=True, size=(8, 12), sizes=(2, 6)):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(size[0], 1)) if scaled else None
        self.weight = nn.Parameter(torch.randn(size))
        self.mode, self.factor, self.turned = mode, factor, turned
        batch, rows = sizes
        self.batch = (torch.randn(batch, size[0], rows), torch.randn(batch, rows, size[1]))

    def forward(self, x, target):
        x = (x if self.scale is None else x * self.scale).transpose(1, 2)
        x = x if self.turned else x.contiguous()
        y = poptorch.serializedMatMul(x, self.weight, self.mode, self.factor)
        return y, F.mse_loss(y, target)


def step(module, engine):
    training = poptorch.trainingModel(
        module, poptorch.Options().engine(engine), torch.optim.SGD(module.parameters(), lr=0.1)
    )
    return training, training(*module.batch)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("mode", [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels])
def test_gradients_of_pieces_are_those_of_the_product(mode, turned):
    assert_trains_like_pytorch(Projection(mode, 2, turned=turned), "eager")


def assert_trains_like_pytorch(module, engine):
    plain = copy.deepcopy(module)
    _, result = step(module, engine)
    expected = plain(*plain.batch)
    expected[1].backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


class Batches(nn.Module):
    """A product of two batches of matrices, one of which is repeated for the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Parameter(torch.randn(2, 1, 4, 3)), nn.Parameter(torch.randn(3, 3, 2))
        self.batch = (torch.randn(2, 3, 4, 2),)

    def forward(self, target):
        product = poptorch.serializedMatMul(self.left, self.right, Mode.InputChannels, 2)
        return product, F.mse_loss(product, target)


def test_gradients_of_batches_of_products():
    assert_trains_like_pytorch(Batches(), "eager")


@pytest.mark.inductor
def test_a_training_step_in_pieces_needs_less_memory(engine):
    """A product of a batch in another order of memory copies it, and keeps the copy for the backward pass."""
    peaks = {}
    for mode in (Mode.Disabled, Mode.InputChannels):
        module = Projection(mode, 8, scaled=False, size=(256, 32), sizes=(16, 256))
        plain = copy.deepcopy(module)
        training, _ = step(module, engine)
        if mode is Mode.InputChannels:
            assert_trains_like_pytorch(plain, engine)
        peaks[mode] = peak_nbytes(lambda training=training, module=module: training(*module.batch))
    assert peaks[Mode.InputChannels] < 0.5 * peaks[Mode.Disabled], peaks


def forward_peaks(x, y, engine):
    """The memory that a product needs as a whole and in pieces."""
    for mode in (Mode.Disabled, Mode.InputChannels):
        module = Apply(lambda x, y, mode=mode: poptorch.serializedMatMul(x, y, mode, 8))
        model = poptorch.inferenceModel(module, poptorch.Options().engine(engine))
        model(x, y)
        yield peak_nbytes(lambda model=model: model(x, y))


@pytest.mark.inductor
def test_a_float16_product_in_pieces_needs_less_memory(engine):
    """Products of float16 are computed in float32, which takes a copy of both operands and of the result."""
    whole, pieces = forward_peaks(torch.randn(1024, 512).half(), torch.randn(512, 64).half(), engine)
    assert pieces < 0.5 * whole


def test_a_product_of_repeated_batches_in_pieces_needs_less_memory():
    """PyTorch writes out all repetitions."""
    whole, pieces = forward_peaks(torch.randn(8, 1, 128, 64), torch.randn(1, 8, 64, 16), "eager")
    assert pieces < 0.5 * whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("input_channels", 2), "poptorch.MatMulSerializationMode as mode"),
        ((Mode.ReducingDim, 2.0), "int as factor"),
        ((Mode.ReducingDim, 2, 1), "bool as keep_precision"),
    ],
)
def test_arguments_of_the_wrong_type(arguments, message):
    with pytest.raises(AssertionError, match=message):
        poptorch.serializedMatMul(torch.ones(2, 2), torch.ones(2, 2), *arguments)


def test_a_factor_that_does_not_divide_names_the_size():
    with pytest.raises(poptorch.Error, match="cut 45 columns of rhs into 2 equal pieces") as error:
        infer(lambda x, y: poptorch.serializedMatMul(x, y, Mode.OutputChannels, 2), torch.ones(2, 3), torch.ones(3, 45))
    assert "divides 45" in str(error.value)


# ---- recomputationCheckpoint


def test_checkpoints_keep_the_structure():
    x, y = torch.ones(1), torch.ones(1)
    assert isinstance(poptorch.recomputationCheckpoint(x), torch.Tensor)
    for given, kind in (((x, y), tuple), (([x, y],), list), (((x, y),), tuple)):
        marked = poptorch.recomputationCheckpoint(*given)
        assert type(marked) is kind
        assert len(marked) == 2
    nested = poptorch.recomputationCheckpoint([x, (y, [x])])
    assert isinstance(nested[1], tuple)
    assert isinstance(nested[1][1], list)


def test_a_checkpoint_takes_tensors():
    with pytest.raises(ValueError, match=r"All inputs must be tensors.*given 3"):
        poptorch.recomputationCheckpoint(3)


def test_a_checkpoint_is_noted_on_the_op_that_computes_the_value():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            y, z = poptorch.recomputationCheckpoint(torch.sin(self.w * x), torch.exp(self.w))
            return poptorch.identity_loss(y * z, "sum")

    module, plain = Model(), Model()
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.tensor([0.25, 0.5])
    training(x)
    assert hints(training, "checkpoint") == {"aten.sin.default": True, "aten.exp.default": True}
    plain(x).backward()
    torch.testing.assert_close(module.w.detach(), 1 - 0.1 * plain.w.grad)
