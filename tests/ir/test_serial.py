"""Graphs as plain data: nothing is lost on the way there and back, and nonsense is refused."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from poptorch.ir import verify
from poptorch.ir.digest import are_equal, graph_digest
from poptorch.ir.serial import FormatError, graph_data, graph_from, origin_data


class Varied(nn.Module):
    """Ops with every kind of argument: types, formats, infinities, lists, optional ones, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.constant = [torch.tensor([0.5, 1.5, 2.5])]

    def forward(self, x, target):
        y = F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1)
        y = y[:, :3].to(torch.float16).float() + self.constant[0]
        y = torch.where(y > math.inf, -math.inf, y) + torch.zeros(3, dtype=torch.complex64).real
        y = y.clamp(min=0.0).contiguous(memory_format=torch.preserve_format)
        if y.sum() < -1e9:
            y = y * 2
        return y.topk(2), F.cross_entropy(y, target)


def trained(accumulated: int = 1):
    torch.manual_seed(0)
    model = Varied()
    options = poptorch.Options().runSideBySide(False)
    options.Training.gradientAccumulation(accumulated)
    training = poptorch.trainingModel(model, options, torch.optim.Adam(model.parameters()))
    training(torch.randn(2 * accumulated, 2, 8, 8), torch.zeros(2 * accumulated, dtype=torch.int64))
    return training._executable


@pytest.fixture(scope="module")
def executable():
    return trained()


def test_graphs_come_back_from_json_as_they_were(executable):
    for program in executable.programs:
        graph = program.graph
        data, origin = (json.loads(json.dumps(part)) for part in (graph_data(graph), origin_data(graph)))
        back = graph_from(data, origin, graph.constants)
        verify(back)
        assert str(back) == str(graph)
        assert are_equal(back, graph)
        assert graph_digest(back) == graph_digest(graph)


def test_equal_programs_are_equal_and_others_are_not(executable):
    again, other = trained(), trained(accumulated=2)
    assert are_equal(again.step.graph, executable.step.graph)
    assert not are_equal(other.update.graph, executable.update.graph)  # another number of gradients is averaged


def test_the_digest_does_not_depend_on_lines_but_on_what_is_computed(executable):
    graph = executable.step.graph
    data, origin = graph_data(graph), copy.deepcopy(origin_data(graph))
    for op in origin["ops"]:
        if op is not None and op[0] is not None:
            op[0]["file"], op[0]["line"] = "elsewhere.py", 1
    moved = graph_from(data, origin, graph.constants)
    assert graph_digest(moved) == graph_digest(graph)
    assert not are_equal(moved, graph)
    name = next(iter(graph.constants))
    changed = graph_from(data, origin, {**graph.constants, name: graph.constants[name] + 1})
    assert graph_digest(changed) != graph_digest(graph)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data["ops"][0].__setitem__(0, "os.system.default"),
        lambda data: data["ops"][0].__setitem__(0, "aten.__class__.default"),
        lambda data: data["ops"][0].__setitem__(0, "aten.relu"),
        lambda data: data["ops"][0].__setitem__(1, [{"node": 10_000}]),
        lambda data: data["ops"][0].__setitem__(1, [{"code": "print()"}]),
        lambda data: data["ops"][0].__setitem__(0, "aten.from_file.default"),
        lambda data: data["ops"][0].__setitem__(2, {"x=print('run'), y": 1}),
        lambda data: data["ops"][0].__setitem__(2, {"mode": 'a"); std::abort(); ("'}),
        lambda data: data["ops"][0].__setitem__(2, {"mode": "a\n"}),
        lambda data: data["inputs"][0].__setitem__(2, "nn"),
        lambda data: data["inputs"][0].__setitem__(3, [2**70]),
        lambda data: data["outputs"].append(["a", "no role", True, None, 0]),
        lambda data: data.pop("ops"),
    ],
)
def test_nonsense_is_refused(spoil, executable):
    graph = executable.step.graph
    data = copy.deepcopy(graph_data(graph))
    spoil(data)
    with pytest.raises(FormatError):
        graph_from(data, origin_data(graph), graph.constants)


class Hinted(nn.Module):
    """Ops with every kind of hint."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, x):
        with poptorch.MultiConv().availableMemoryProportions([0.5]), poptorch.NameScope("part"):
            x = self.conv(x)
        with poptorch.Attribute(__outline={"layer": "head"}):
            return poptorch.recomputationCheckpoint(poptorch.set_available_memory(x @ x, 0.25))


def test_hints_come_back_and_do_not_change_what_a_graph_is_called():
    model = poptorch.inferenceModel(Hinted())
    model(torch.ones(1, 1, 2, 2))
    graph = model._executable.step.graph
    data, origin = (json.loads(json.dumps(part)) for part in (graph_data(graph), origin_data(graph)))
    back = graph_from(data, origin, graph.constants)
    assert str(back) == str(graph)
    assert are_equal(back, graph)
    for hint in ("[multi_conv", "[scope part]", "[attributes (__outline=(layer=head))]", "[checkpoint]"):
        assert hint in str(back)
    assert "[available_memory 0.25]" in str(back)
    for op in origin["ops"]:
        op[3] = []
    plain = graph_from(data, origin, graph.constants)
    assert graph_digest(plain) == graph_digest(graph)
    assert not are_equal(plain, graph)
