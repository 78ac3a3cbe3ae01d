"""Layers that are alike become calls of one graph, and the program computes what it did."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from parts import calls, run, run_in_parts
from poptorch.engines.calls import cut_at_calls
from poptorch.engines.host import Host, run_host_passes, unobserved
from poptorch.engines.passes import layers
from poptorch.engines.passes.channels_last import convolution_weights
from poptorch.engines.passes.draw_ahead import DRAWS
from poptorch.engines.passes.native import NATIVE
from poptorch.ir import StepGraph


@pytest.fixture
def small(monkeypatch):
    """Let few and short layers count."""
    monkeypatch.setattr(layers, "_FEWEST_OPS", 1)
    monkeypatch.setattr(layers, "_FEWEST_SAVED", 1)


class Stack(nn.Module):
    """Layers one after the other, and a loss."""

    def __init__(self, *stack: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stack)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, poptorch.identity_loss(x.square().mean(), reduction="mean")


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.1, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.fc, self.dropout, self.scale = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(dropout), scale

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.fc(self.norm(x)))) * self.scale


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Shared(Stack):
    """One layer that is used again and again."""

    def __init__(self) -> None:
        super().__init__(Residual())

    def forward(self, x):
        for _ in range(6):
            x = self.layers[0](x)
        return x, poptorch.identity_loss(x.square().mean(), reduction="mean")


class Tied(Stack):
    """Layers with one weight, and biases of their own."""

    def __init__(self) -> None:
        super().__init__(*[Residual() for _ in range(6)])
        for layer in self.layers:
            layer.fc.weight = self.layers[0].fc.weight  # pyright: ignore


class Skipping(Stack):
    """What each layer computes is used a second time at the other end, and all are returned."""

    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        for layer, other in zip(self.layers, reversed(seen), strict=True):
            x = layer(x + other)
        return *seen, seen[2][0], poptorch.identity_loss(x.square().mean(), reduction="mean")


class Counting(Stack):
    """Layers that write state, of which some is read once more after all of them."""

    def __init__(self) -> None:
        super().__init__(*[Residual() for _ in range(6)])
        for index in range(6):
            self.register_buffer(f"seen{index}", torch.zeros(4))

    def forward(self, x):
        before = self.seen1
        for index, layer in enumerate(self.layers):
            x = layer(x)
            setattr(self, f"seen{index}", self.get_buffer(f"seen{index}") + x.detach().mean(0))
        return x, before * 2, poptorch.identity_loss((x + before).square().mean(), reduction="mean")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(7, 4), nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)

    def forward(self, x):
        y = self.encoder(self.embedding(x))
        scores = F.linear(y, self.embedding.weight)  # whose gradient comes from both ends
        return scores, poptorch.identity_loss(scores.square().mean(), reduction="mean")


def residuals(count: int = 6) -> Stack:
    return Stack(*[Residual() for _ in range(count)])


def images() -> Stack:
    return Stack(*[Image() for _ in range(6)])


RANDOM = torch.Generator().manual_seed(0)
ROWS, PICTURES = torch.randn(4, 4, generator=RANDOM), torch.randn(4, 3, 4, 4, generator=RANDOM)
TOKENS = torch.arange(12).reshape(4, 3) % 7
MODELS = {
    "residual": (residuals, ROWS),
    "images": (images, PICTURES),
    "one layer": (Shared, ROWS),
    "tied": (Tied, ROWS),
    "skipping": (lambda: Skipping(*[Residual() for _ in range(5)]), ROWS),
    "counting": (Counting, ROWS),
    "attention": (Attention, TOKENS),
}


def trained(
    model: nn.Module, x: torch.Tensor, *, clip: float | None = None, **batching: int
) -> poptorch.PoplarExecutor:
    """A model after one call on the eager engine."""
    options = poptorch.Options().engine("eager").runSideBySide(batching.get("replicas", 1) > 1).randomSeed(1)
    options.Training.gradientAccumulation(batching.get("accumulation", 1))
    options.replicationFactor(batching.get("replicas", 1))
    if clip is not None:
        options.Training.clipGradNorm(clip)
    executor = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters(), lr=0.01))
    executor(x)
    return executor


def host_graph(executor: poptorch.PoplarExecutor, fewest: int) -> StepGraph:
    """The step as the inductor engine compiles it, with outlined layers if there are enough."""
    step = executor._executable.step
    host = Host(step.fixed, convolution_weights([step.graph]), fewest)
    return run_host_passes(step.graph, host, NATIVE, unobserved)


def inputs(graph: StepGraph) -> list[torch.Tensor]:
    """Tensors for a graph, some of which stand for the state of an optimiser, and so are positive."""
    generator = torch.Generator().manual_seed(0)

    def filled(spec):
        if not spec.dtype.is_floating_point:
            return torch.zeros(spec.shape, dtype=spec.dtype) + (1 if spec.role.is_state else 3)
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        return tensor.copy_(torch.rand(spec.shape, generator=generator) * 0.5 + 0.1)

    return [filled(spec) for spec in graph.signature.inputs]


def layer_calls(graph: StepGraph) -> list[str]:
    return [name for name in calls(graph) if name.startswith("layer")]


def check(whole: StepGraph, outlined: StepGraph) -> None:
    """Both compute the same: run as they are, and part by part."""
    given = inputs(whole)
    assert [str(spec) for spec in outlined.signature.inputs] == [str(spec) for spec in whole.signature.inputs]
    expected = run(whole, copy.deepcopy(given), [])
    torch.testing.assert_close(run(outlined, copy.deepcopy(given), []), expected, rtol=0, atol=0)
    state = len(whole.signature.state)
    changed = copy.deepcopy(given)
    returned = run_in_parts(outlined, changed[:state], changed[state:])
    results = dict(zip([(s.name, s.role.value) for s in whole.signature.outputs], expected, strict=True))
    wanted = [result for (_, role), result in results.items() if role != "new value"]
    torch.testing.assert_close(returned, wanted, rtol=1e-6, atol=1e-7)
    for spec, ours, before in zip(whole.signature.state, changed, given, strict=False):
        torch.testing.assert_close(ours, results.get((spec.name, "new value"), before), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "batching"),
    [
        *((name, {}) for name in MODELS),
        *((name, {"accumulation": 2}) for name in ("residual", "images", "tied", "counting")),
        *((name, {"replicas": 2}) for name in ("images", "attention")),
    ],
    ids=str,
)
def test_outlined_layers_compute_what_the_whole_does(name, batching):
    torch.manual_seed(0)
    make, x = MODELS[name]
    executor = trained(make(), x, **batching)
    outlined = host_graph(executor, 3)
    assert len(layer_calls(outlined)) >= 6
    check(host_graph(executor, 0), outlined)


@pytest.mark.usefixtures("small")
def test_gradients_that_are_clipped_together_are_handed_over():
    executor = trained(residuals(), ROWS, clip=0.1)
    check(host_graph(executor, 0), outlined := host_graph(executor, 3))
    assert len(layer_calls(outlined)) >= 6


@functools.cache
def residual_graph() -> StepGraph:
    """The outlined step of eight layers."""
    return host_graph(trained(residuals(8), ROWS), 3)


@pytest.mark.usefixtures("small")
def test_forward_and_backward_pass_are_one_graph_each():
    outlined = residual_graph()
    found = layer_calls(outlined)
    assert found.count("layer0") >= 6
    assert found.count("layer1") >= 5
    assert len(set(found)) == 2


@pytest.mark.usefixtures("small")
def test_the_first_and_the_last_layer_are_like_the_others_also_if_they_are_given_a_view():
    stack = [nn.Linear(5, 4), *[Residual(dropout=0.0) for _ in range(6)], nn.Flatten(), nn.Linear(12, 2)]
    executor = trained(Stack(*stack), torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)))
    outlined = host_graph(executor, 3)
    check(host_graph(executor, 0), outlined)
    found = layer_calls(outlined)
    assert (found.count("layer0"), found.count("layer1")) == (6, 6)


@pytest.mark.usefixtures("small")
def test_each_occurrence_drops_out_something_else():
    outlined = residual_graph()
    drawn = {node for spec, node in outlined.inputs if spec.name.startswith("drawn:")}
    assert len(drawn) == 8
    of_calls = [[n for n in node.args[1] if n in drawn] for node in outlined.ops.nodes if node.args[:1] == ("layer0",)]
    assert all(len(own) == 1 for own in of_calls)
    assert len({own[0] for own in of_calls}) == len(of_calls)
    assert DRAWS in outlined.graphs


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("other", [Residual(dropout=0.3), Residual(scale=0.5)], ids=["dropout", "scale"])
def test_layers_with_other_numbers_do_not_share_a_graph(other):
    model = Stack(*[copy.deepcopy(layer) for layer in [Residual()] * 5 + [other] * 5])
    executor = trained(model, ROWS)
    outlined = host_graph(executor, 3)
    check(host_graph(executor, 0), outlined)
    forward = layer_calls(outlined)[:8]
    assert "layer0" in forward
    assert "layer1" in forward
    assert forward == sorted(forward)


@pytest.mark.usefixtures("small")
def test_layers_that_all_differ_stay_as_they_are():
    executor = trained(Stack(*[Residual(scale=1 + index / 10) for index in range(6)]), ROWS)
    assert not layer_calls(host_graph(executor, 3))


@pytest.mark.usefixtures("small")
def test_a_layer_of_another_kind_in_the_middle_leaves_two_runs():
    executor = trained(Stack(*[Residual() for _ in range(5)], nn.Tanh(), *[Residual() for _ in range(5)]), ROWS)
    outlined = host_graph(executor, 3)
    check(host_graph(executor, 0), outlined)
    assert layer_calls(outlined).count("layer0") >= 8


@pytest.mark.usefixtures("small")
def test_statistics_are_written_by_the_layer_that_computes_them():
    outlined = host_graph(trained(images(), PICTURES), 3)
    written = outlined.graphs["layer0"].signature.written
    assert len(written) == 3  # mean, variance and count
    assert not [name for name in cut_at_calls(outlined).own or {} if "running_mean" in str(name)]


@pytest.mark.usefixtures("small")
def test_sums_of_gradients_are_written_by_the_layer_that_computes_the_gradients():
    outlined = host_graph(trained(residuals(8), ROWS, accumulation=2), 3)
    assert len(outlined.graphs["layer1"].signature.written) == 4  # weights and biases of norm and product


@pytest.mark.usefixtures("small")
def test_state_that_is_read_later_is_written_in_the_end():
    outlined = host_graph(trained(Counting(), ROWS), 3)
    last = cut_at_calls(outlined).own or {}
    assert any("seen1" in graph.signature.written for graph in last.values())


def test_few_layers_and_short_programs_are_left_whole():
    executor = trained(residuals(5), ROWS)
    assert not layer_calls(host_graph(executor, 6))
    assert not layer_calls(host_graph(executor, 0))
    assert not layer_calls(host_graph(trained(Stack(*[nn.Tanh() for _ in range(6)], nn.Linear(4, 4)), ROWS), 3))


def test_short_layers_are_taken_several_at_a_time():
    outlined = host_graph(trained(Stack(*[nn.Linear(4, 4) for _ in range(48)]), ROWS), 6)
    sizes = [graph.count_ops() for name, graph in outlined.graphs.items() if name.startswith("layer")]
    assert sizes
    assert min(sizes) >= 20
    assert len(layer_calls(outlined)) <= 24


@pytest.mark.usefixtures("small")
def test_inference_has_layers_too():
    model = poptorch.inferenceModel(residuals(), poptorch.Options().engine("eager"))
    model(ROWS)
    outlined = host_graph(model, 3)
    assert len(layer_calls(outlined)) >= 4
    check(host_graph(model, 0), outlined)


@pytest.mark.usefixtures("small")
def test_a_program_that_calls_python_is_left_whole():
    class Printing(Stack):
        def forward(self, x):
            return super().forward(poptorch.ipu_print_tensor(x))

    assert not layer_calls(host_graph(trained(Printing(*[Residual() for _ in range(6)]), ROWS), 3))


def train_both(make, x: torch.Tensor, engine: str, folder, **batching: int) -> tuple[list[nn.Module], Any]:
    """Two equal models after three steps, one on the eager engine; and the session of the other."""
    models: list[nn.Module] = []
    session = None
    for each in ("eager", engine):
        torch.manual_seed(0)
        model = make()
        options = poptorch.Options().engine(each).runSideBySide(False).randomSeed(1)
        options.Training.gradientAccumulation(batching.get("accumulation", 1))
        options.replicationFactor(batching.get("replicas", 1)).enableExecutableCaching(str(folder))
        executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
        for step in range(3):
            executor(x + step)
        models.append(model)
        session = executor._session
    return models, session


@pytest.mark.inductor
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("make", "x", "batching"),
    [
        (Tied, torch.cat([ROWS, ROWS + 1]), {"accumulation": 2, "replicas": 2}),  # with dropout
        (images, PICTURES, {}),
    ],
    ids=["tied", "images"],
)
def test_code_for_layers_trains_like_the_eager_engine_and_can_be_kept(make, x, batching, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_ALIKE_LAYERS", "3")
    monkeypatch.setenv("POPTORCH_CACHE", "1")
    for _ in range(2):
        (expected, found), session = train_both(make, x, engine, tmp_path, **batching)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
        if engine == "inductor":
            kernel = next(iter(session.kernels.values()))
            assert sum(part.graph.startswith("layer") for part in kernel.cut.parts) >= 8
        monkeypatch.setattr("poptorch.engines.inductor.generate", None)  # the second time nothing is compiled
