"""Hints are written on the ops they are about, and what carried them is removed."""

from __future__ import annotations

import torch
from torch import nn

import poptorch
from models import Apply, Regression
from poptorch.compiler.passes.hints import settle_hints
from poptorch.ir import StepGraph, hint_of, verify
from poptorch.options import resolve

SETTINGS = resolve(poptorch.Options(), training=False)


def captured(function, *args) -> StepGraph:
    """The graph of a function before any pass."""
    from poptorch.capture import Call
    from poptorch.capture.record import capture_inference
    from poptorch.structure import flatten

    arguments, tensors = flatten(args)
    keywords, _ = flatten({})
    names = tuple(f"x{index}" for index in range(len(args)))
    module = function if isinstance(function, nn.Module) else Apply(function)
    return capture_inference(module, Call(arguments, keywords, names, tuple(tensors)), SETTINGS).graph


def targets(graph: StepGraph) -> list[str]:
    return [str(node.target) for node in graph.ops.nodes if node.op == "call_function"]


def test_a_graph_without_hints_stays_as_it_is():
    graph = captured(Regression(), torch.ones(1, 3), torch.ones(1, 2))
    assert settle_hints(graph, SETTINGS) is graph


def test_the_given_graph_is_not_changed():
    graph = captured(lambda x: poptorch.set_available_memory(x @ x, 0.5), torch.ones(2, 2))
    before = str(graph)
    settled = settle_hints(graph, SETTINGS)
    verify(settled)
    assert str(graph) == before
    assert "poptorch.hint.default" in targets(graph)
    assert "poptorch.hint.default" not in targets(settled)


def test_the_last_of_several_hints_counts():
    def forward(x):
        return poptorch.set_available_memory(poptorch.set_available_memory(x @ x, 0.5), 0.7)

    settled = settle_hints(captured(forward, torch.ones(2, 2)), SETTINGS)
    assert [hint_of(node, "available_memory") for node in settled.ops.nodes if "mm" in str(node.target)] == [0.7]


def test_the_hint_of_one_product_does_not_reach_the_next():
    def forward(x):
        y = poptorch.set_available_memory(x @ x, 0.5)
        return y @ x

    settled = settle_hints(captured(forward, torch.ones(2, 2)), SETTINGS)
    assert [hint_of(node, "available_memory") for node in settled.ops.nodes if "mm" in str(node.target)] == [0.5, None]


def test_both_products_of_a_sum_are_meant():
    def forward(x, y):
        return poptorch.set_available_memory(x @ x + y @ y, 0.5)

    settled = settle_hints(captured(forward, torch.ones(2, 2), torch.ones(2, 2)), SETTINGS)
    assert [hint_of(node, "available_memory") for node in settled.ops.nodes if "mm" in str(node.target)] == [0.5, 0.5]


def test_an_input_that_is_marked_and_returned_is_copied():
    settled = settle_hints(captured(poptorch.recomputationCheckpoint, torch.ones(2)), SETTINGS)
    assert "aten.clone.default" in targets(settled)


def test_hints_in_the_bodies_of_loops_and_branches_are_settled():
    def forward(x):
        (y,) = poptorch.for_loop(2, lambda z: poptorch.set_available_memory(z @ x, 0.5), [x])
        return poptorch.cond(x[0, 0] > 0, lambda z: poptorch.recomputationCheckpoint(z @ x), [y], lambda z: z, [y])

    graph = captured(forward, torch.ones(2, 2))
    settled = settle_hints(graph, SETTINGS)
    verify(settled)
    bodies = list(settled.graphs.values())
    assert any("poptorch.hint.default" in targets(body) for body in graph.graphs.values())
    assert not any("poptorch.hint.default" in targets(body) for body in bodies)
    products = [node for body in bodies for node in body.ops.nodes if "mm" in str(node.target)]
    found = [(hint_of(node, "available_memory"), hint_of(node, "checkpoint")) for node in products]
    assert found == [(0.5, None), (None, True)]


def test_a_multi_conv_in_the_body_of_a_loop_gives_each_convolution_its_options():
    first, second = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

    def body(x):
        with poptorch.MultiConv().availableMemoryProportions((0.8, 0.7)):
            return first(x) + second(x)

    settled = settle_hints(captured(lambda x: poptorch.for_loop(2, body, [x]), torch.ones(1, 1, 2, 2)), SETTINGS)
    (loop,) = settled.graphs.values()
    said = [hint_of(node, "multi_conv") for node in loop.ops.nodes if node.target is torch.ops.aten.convolution.default]
    assert [dict(options)["available_memory"] for options in said if options] == [0.8, 0.7]
