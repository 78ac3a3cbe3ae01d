"""The update of many parameters in pieces does what it does as a whole, with few patterns to compile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import poptorch
from models import Regression
from parts import calls, run, run_in_parts
from poptorch.engines.calls import cut_at_calls
from poptorch.engines.host import Host, run_host_passes, unobserved
from poptorch.engines.passes.outline import outline_updates
from poptorch.engines.portable import kernels_from, make_portable
from poptorch.executable import Program
from poptorch.ir import Role, StepGraph, call_graph

SHAPES = [(3,), (2, 3), (), (1,), (2, 2, 2)] * 3 + [(90, 100)]


class Many(nn.Module):
    """Many parameters, each with a gradient of its own."""

    def __init__(self, shapes=SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tensors = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])

    def forward(self, x):
        flat = torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        return poptorch.identity_loss((flat * x.mean() + flat.sin() / 10).sum(), reduction="sum")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw_in_two_groups(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.01, "weight_decay": 0.0}])


def lamb(parameters):
    return poptorch.optim.LAMB(parameters, lr=0.01)


def nadam(parameters):
    return torch.optim.NAdam(parameters, lr=0.01)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.01)


class ManyLayers(nn.Module):
    """Parameters of several dimensions, buffers, a frozen parameter, and a result that is a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)) for _ in range(5)])
        self.layers[0][0].bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x, self.layers[1][0].weight[0], poptorch.identity_loss(x.square().mean(), reduction="mean")


def options_for(engine: str, accumulation: int = 2) -> poptorch.Options:
    options = poptorch.Options().engine(engine).runSideBySide(False)  # so that the update is a program of its own
    options.Training.gradientAccumulation(accumulation)
    return options


def trained(make, *, max_norm: float | None = None, accumulation: int = 2) -> poptorch.PoplarExecutor:
    """A model after one call, so that momentum and step counts are not those of the beginning."""
    model, options = Many(), options_for("eager", accumulation)
    if max_norm is not None:
        options.Training.clipGradNorm(max_norm)
    training = poptorch.trainingModel(model, options, make(list(model.parameters())))
    training(torch.ones(accumulation))
    return training


def outlined(program: Program) -> StepGraph:
    return run_host_passes(program.graph, Host(), (outline_updates,), unobserved)


@pytest.mark.parametrize(
    ("make", "max_norm"), [(sgd, None), (adamw_in_two_groups, 0.1), (lamb, 0.1), (nadam, None), (adafactor, None)]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_pieces_do_what_the_whole_does(make, max_norm, accumulation):
    training = trained(make, max_norm=max_norm, accumulation=accumulation)
    program = training._executable.update or training._executable.step
    tensors = {**program.constants, **training._current.state.tensors()}
    generator = torch.Generator().manual_seed(1)
    state = [
        tensors[spec.name].detach().clone()
        if spec.name in tensors
        else torch.randn(spec.shape, generator=generator)  # the sum of the gradients
        for spec in program.state
    ]
    of_user = [torch.tensor([2.0])] if accumulation == 1 else []
    expected = run(program.graph, copy.deepcopy(state), of_user)
    graph = outlined(program)
    assert len(calls(graph)) == len(SHAPES)
    torch.testing.assert_close(run(graph, copy.deepcopy(state), of_user), expected)
    before = copy.deepcopy(state)
    returned = run_in_parts(graph, state, of_user)
    assert len(returned) == len(of_user)
    torch.testing.assert_close(returned, list(expected[: len(of_user)]))
    new = dict(zip([spec.name for spec in program.signature.outputs], expected, strict=True))
    for spec, ours, old in zip(program.state, state, before, strict=True):
        torch.testing.assert_close(ours, new.get(spec.name, old), msg=spec.name)
        assert spec.role is not Role.PARAMETER or (ours != old).any()


def test_parameters_of_every_shape_share_few_graphs():
    graph = outlined(trained(torch.optim.AdamW)._executable.update)
    kinds = [inner.takes_any_length for inner in graph.graphs.values()]
    assert kinds == [True, False, True]  # vectors, numbers, long vectors
    assert set(calls(graph)) == {"piece0", "piece1", "piece2"}


def test_numbers_of_each_parameter_are_elements_of_vectors_that_have_memory_of_their_own():
    cut = cut_at_calls(outlined(trained(torch.optim.AdamW)._executable.update))
    assert [kept.shape for kept in cut.kept] == [(len(SHAPES),)] * 2  # the corrections of both moments
    shared = [part for part in cut.parts if not part.graph.startswith("piece")]
    assert sum(part.results for part in shared) < len(SHAPES)


def test_parameters_with_other_hyperparameters_have_other_operands_but_the_same_code():
    graph = outlined(trained(adamw_in_two_groups)._executable.update)
    one, other = [node for node in graph.ops.nodes if node.target is call_graph][:6:5]
    assert one.args[0] == other.args[0]
    assert one.args[1][-3:] != other.args[1][-3:]


def test_a_step_and_a_small_update_are_left_whole():
    training = trained(sgd)
    step = training._executable.step
    assert outlined(step) is step.graph
    small = Regression()
    model = poptorch.trainingModel(small, options_for("eager"), sgd(small.parameters()))
    model(torch.ones(2, 3), torch.ones(2, 2))
    assert outlined(model._executable.update) is model._executable.update.graph


def test_an_update_that_reads_the_users_tensor_is_left_whole():
    program = trained(sgd, accumulation=1)._executable.step
    assert outlined(program) is not program.graph
    x = program.graph.placeholders[-1]
    update = next(
        n for n in program.graph.ops.nodes if str(n.target) == "aten.sub.Tensor" and n.meta["val"].shape == (1,)
    )
    update.args = (update.args[0], x)  # as if the gradient were what the user gave
    assert outlined(program) is program.graph


@pytest.mark.inductor
def test_many_parameters_train_like_in_plain_pytorch(engine):
    model, reference = Many([(3,), (2, 3)] * 8), Many([(3,), (2, 3)] * 8)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options_for(engine), torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(3):
        batch = torch.arange(1.0, 5.0) + step
        training(batch)
        optimizer.zero_grad()
        for rows in batch.split(2):
            (reference(rows) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-4, atol=1e-5)
    if engine == "inductor":
        kernel = training._session.kernels["update"]
        assert kernels_from(make_portable({"update": kernel}))["update"].cut == kernel.cut


@pytest.mark.inductor
def test_a_step_of_many_parameters_trains_like_plain_pytorch(engine):
    torch.manual_seed(0)
    model = ManyLayers()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    options = options_for(engine, accumulation=1)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        x = torch.randn(2, 2, 4, 4)
        optimizer.zero_grad()
        expected = reference(x)
        expected[2].backward()
        expected = [tensor.detach().clone() for tensor in expected]  # before the update changes the part of a weight
        optimizer.step()
        torch.testing.assert_close(list(training(x)), expected, rtol=1e-4, atol=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
    if engine == "inductor":
        cut = training._session.kernels["step"].cut
        assert sum(part.graph.startswith("piece") for part in cut.parts) == len(list(model.parameters())) - 1
