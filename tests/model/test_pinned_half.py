"""Models in float16, in part or as a whole: the types of what they compute, and how well they learn."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply, Regression

HALF, FLOAT = torch.float16, torch.float32
UPCAST = poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat


def options(casting: poptorch.HalfFloatCastingBehavior | None = None) -> poptorch.Options:
    found = poptorch.Options().engine("eager").randomSeed(1)
    if casting is not None:
        found.Precision.halfFloatCasting(casting)
    return found


def run(function, *args, casting=None):
    return poptorch.inferenceModel(Apply(function), options(casting))(*args)


def test_casts_leave_the_input_alone():
    x = torch.tensor([1.5, 2.5])
    for result in run(lambda x: (x.to(HALF), x.half(), x.type(HALF)), x):
        assert result.dtype is HALF
        assert torch.equal(result.float(), x)
    assert x.dtype is FLOAT


RECURRENT = {"LSTM": nn.LSTM(4, 3), "GRU": nn.GRU(4, 3, bias=False), "RNN": nn.RNN(4, 3, num_layers=2)}
CELLS = {"LSTMCell": nn.LSTMCell(4, 3), "GRUCell": nn.GRUCell(4, 3), "RNNCell": nn.RNNCell(4, 3, nonlinearity="relu")}


@pytest.mark.parametrize("weights", [HALF, FLOAT])
@pytest.mark.parametrize("activation", [HALF, FLOAT])
@pytest.mark.parametrize("name", [*RECURRENT, *CELLS])
def test_recurrent_layers_follow_their_input(name, activation, weights):
    layer = copy.deepcopy((RECURRENT | CELLS)[name])
    x = torch.randn(3, 2, 4) if name in RECURRENT else torch.randn(2, 4)
    expected = torch.utils._pytree.tree_leaves(layer(x.to(activation).float()))
    result = poptorch.inferenceModel(layer.to(weights), options())(x.to(activation))
    for value, wanted in zip(torch.utils._pytree.tree_leaves(result), expected, strict=True):
        assert value.dtype is activation
        torch.testing.assert_close(value.float(), wanted.detach(), rtol=1e-2, atol=1e-2)


class Tagger(nn.Module):
    """A recurrent layer with float32 weights, fed in float16, with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)
        self.start = nn.Parameter(torch.zeros(1, 1, 3))

    def forward(self, x, target):
        state = self.start.expand(1, x.shape[1], 3).contiguous()
        y, _ = self.lstm(x, (state, state))
        return y, F.mse_loss(y, target)


def test_a_recurrent_layer_with_float32_weights_is_trained_in_float16():
    torch.manual_seed(0)
    model, x, target = Tagger(), torch.randn(3, 2, 4), torch.rand(3, 2, 3)
    twin = copy.deepcopy(model)
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.5))
    y, loss = training(x.half(), target.half())
    assert y.dtype is loss.dtype is HALF
    expected = twin(x, target)[1]
    expected.backward()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.dtype is FLOAT
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
    with pytest.raises(ValueError, match="does not match weight dtype"):
        model.lstm(x.half())  # the layer itself is again as PyTorch has it


CREATED = {
    "ones": lambda dtype: torch.ones(2, 2, dtype=dtype),
    "zeros": lambda dtype: torch.zeros(2, 2, dtype=dtype),
    "full": lambda dtype: torch.full((2, 2), 3.0, dtype=dtype),
    "constant": lambda dtype: torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype),
    "rand": lambda dtype: torch.rand(2, 2, dtype=dtype),
    "normal_": lambda dtype: torch.empty(2, 2, dtype=dtype).normal_(),
    "uniform_": lambda dtype: torch.empty(2, 2, dtype=dtype).uniform_(),
    "Normal": lambda dtype: D.Normal(torch.zeros(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype)).sample(),
    "Uniform": lambda dtype: D.Uniform(torch.zeros(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype)).sample(),
}


@pytest.mark.parametrize("casting", poptorch.HalfFloatCastingBehavior)
@pytest.mark.parametrize("name", CREATED)
def test_what_forward_creates_has_the_type_it_was_given_and_mixes_by_the_mode(name, casting):
    create = CREATED[name]

    def forward(x):
        created = [create(dtype) for dtype in (x.dtype, HALF, FLOAT)]
        return [*created, *(x + value for value in created)]

    for given in (HALF, FLOAT):
        *created, same, half, full = [
            value.dtype for value in run(forward, torch.ones(2, 2, dtype=given), casting=casting)
        ]
        mixed = FLOAT if casting is UPCAST else HALF
        assert created == [given, HALF, FLOAT]
        assert same is given
        assert (half, full) == ((HALF, mixed) if given is HALF else (mixed, FLOAT))


@pytest.mark.parametrize("casting", poptorch.HalfFloatCastingBehavior)
@pytest.mark.parametrize("target", [HALF, FLOAT])
def test_what_is_written_into_keeps_its_type(target, casting):
    operand = FLOAT if target is HALF else HALF

    def forward(x, y):
        added, put = x.clone(), x.clone()
        added += y
        put[0] = y[0]
        out = torch.zeros_like(x)
        torch.mul(x, y, out=out)
        rows = torch.tensor([0, 0])
        return added, put, out, x.index_add(0, rows, y), x.scatter_add(0, torch.zeros(2, 2, dtype=torch.int64), y)

    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 1.5], [2.5, 3.5]])
    expected = forward(x, y)
    for value, wanted in zip(run(forward, x.to(target), y.to(operand), casting=casting), expected, strict=True):
        assert value.dtype is target
        assert torch.equal(value.float(), wanted)


MIXED = {
    "matmul": lambda x, y: x @ y,
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "inner": torch.inner,
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "cosine_similarity": F.cosine_similarity,
    "cdist": torch.cdist,
    "where": lambda x, y: torch.where(x > y, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
}


@pytest.mark.parametrize("name", MIXED)
def test_every_operation_mixes_by_the_mode(name):
    function = MIXED[name]
    x, y = torch.rand(2, 2).half(), torch.rand(2, 2)
    expected = function(x.float(), y)
    for casting in poptorch.HalfFloatCastingBehavior:
        result = run(function, x, y, casting=casting)
        assert result.dtype is (FLOAT if casting is UPCAST else HALF)
        torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(1, dtype=HALF))

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_a_half_buffer_stays_half_and_is_read_back():
    model = Counter()
    inference = poptorch.inferenceModel(model, options())
    assert inference(torch.zeros(1).half()).item() == 2.0
    inference.copyWeightsToHost()
    assert (model.count.dtype, model.count.item()) == (HALF, 2.0)


class Fitting(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(10, 10) for _ in range(depth)))

    def forward(self, x, target):
        y = self.layers(x)
        return y, F.mse_loss(y, target)


@pytest.mark.parametrize("depth", [1, 5])
def test_float32_weights_learn_from_half_inputs(depth):
    torch.manual_seed(0)
    model, x, target = Fitting(depth), torch.rand(4, 10).half(), torch.rand(4, 10).half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=128.0)
    training = poptorch.trainingModel(model, options(), optimizer)
    losses = [training(x, target)[1].item() for _ in range(300)]
    assert losses[-1] < 0.2 * losses[0]
    assert all(parameter.dtype is FLOAT for parameter in model.parameters())


@pytest.mark.parametrize("scaling", [1.0, 2.0**14])
def test_loss_scaling_saves_gradients_that_float16_has_not(scaling):
    model = Regression().half()
    before = model.fc.weight.detach().clone()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1e6, loss_scaling=scaling)
    x, target = torch.full((4, 3), 2e-6).half(), torch.ones(4, 2).half()
    with torch.no_grad():
        model.fc.bias.fill_(0.99)
    poptorch.trainingModel(model, options(), optimizer)(x, target)
    assert torch.equal(model.fc.weight, before) == (scaling == 1.0)


class Encoder(nn.Module):
    """A transformer that reads tokens and tells their class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens, labels):
        scores = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return scores, F.cross_entropy(scores, labels)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x, labels):
        scores = self.head(self.body(x).mean((2, 3)))
        return scores, F.cross_entropy(scores, labels)


def learn(kind: type[nn.Module], weights: torch.dtype, fed: torch.dtype, steps: int) -> list[float]:
    """The losses of so many steps; float16 gets a scaled loss."""
    torch.manual_seed(0)
    model = kind().to(weights)
    if isinstance(model, Encoder) and fed is not weights:
        model.embedding.register_forward_hook(lambda module, arguments, rows: rows.to(fed))
    x = torch.randint(50, (20, 8)) if kind is Encoder else torch.randn(20, 1, 14, 14).to(fed)
    scaling = 1.0 if fed is FLOAT else 1024.0
    optimizer = poptorch.optim.AdamW(
        model.parameters(), lr=3e-3 if kind is Encoder else 2e-2, loss_scaling=scaling, eps=1e-6
    )
    training = poptorch.trainingModel(model, options(), optimizer)
    return [training(x, torch.arange(20) % 5)[1].item() for _ in range(steps)]


@pytest.mark.long
@pytest.mark.parametrize("weights", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("kind", [Encoder, ConvNet])
def test_float16_with_loss_scaling_converges_like_float32(kind, weights, request):
    steps = 200 if request.config.getoption("--long") else 40
    full, half = learn(kind, FLOAT, FLOAT, steps), learn(kind, weights, HALF, steps)
    assert full[-1] < 0.7 * full[0]
    torch.testing.assert_close(half[: steps // 4], full[: steps // 4], rtol=0.05, atol=0.02)
    assert half[-1] == pytest.approx(full[-1], abs=0.05 * full[0])
