"""Loops and branches as native code: layouts, types and memory that Inductor is particular about."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.engines.control_flow import all_nodes
from poptorch.engines.host import Host, run_host_passes, unobserved
from poptorch.engines.passes.alpha import write_out_alpha
from poptorch.engines.passes.draw_ahead import calls_python, draw_ahead
from poptorch.ir import verify


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.linear = nn.Linear(4, 4)

    def forward(self, *tensors):
        return self.function(self, *tensors)


def run(function, engine, *inputs):
    return poptorch.inferenceModel(Model(function), poptorch.Options().engine(engine))(*inputs)


def program(function, *inputs):
    model = poptorch.inferenceModel(Model(function), poptorch.Options().engine("eager"))
    model.compile(*inputs)
    return model._executable.step.graph


@pytest.mark.inductor
def test_layouts_and_types_that_are_carried(engine):
    def body(square, row, truth, number, nothing):
        return square.t() + 1, row.t().reshape(1, 4), ~truth, number + 1, nothing

    def forward(model, x):
        carried = [x, x[:1], x > 0, (x * 3).to(torch.int8), x[:, :0]]
        return poptorch.for_loop(3, body, carried)

    x = torch.randn(4, 4)
    expected = Model(forward)(x)
    for result, wanted in zip(run(forward, engine, x), expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.inductor
def test_a_convolution_inside_shares_its_weight_with_one_outside(engine):
    def forward(model, x):
        return poptorch.for_loop(2, lambda x: torch.tanh(model.conv(x)), [model.conv(x)])

    x = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(run(forward, engine, x)[0], Model(forward)(x)[0].detach())


def test_passes_reach_the_bodies():
    graph = program(lambda m, x: poptorch.for_loop(2, lambda x: torch.add(x, x, alpha=2), [x]), torch.ones(4))
    changed = run_host_passes(graph, Host(), (write_out_alpha,), unobserved)
    assert any(node.kwargs.get("alpha") == 2 for node in all_nodes(graph))
    assert not any(node.kwargs.get("alpha") == 2 for node in all_nodes(changed))


def test_draws_in_bodies_call_back_and_the_body_knows_it():
    def forward(model, x):
        (drawn,) = poptorch.for_loop(2, lambda x: x + torch.rand(4), [x + torch.rand(4)])
        return drawn + torch.rand(4)

    graph = program(forward, torch.ones(4))
    changed = run_host_passes(graph, Host(), (draw_ahead,), unobserved)
    verify(changed)
    names = [str(node.target) for node in all_nodes(changed)]
    assert names.count("poptorch.draw.default") == 2  # in the body and after it; the first is drawn ahead
    assert calls_python(changed)
    assert not calls_python(program(lambda m, x: poptorch.for_loop(2, torch.sin, [x]), torch.ones(4)))


def test_floating_point_exceptions_are_found_in_bodies():
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(
        Model(lambda m, x: poptorch.for_loop(2, lambda x: 1 / (x - 1) + torch.rand(1), [x])), options
    )
    assert torch.isfinite(model(torch.full((2,), 3.0))[0]).all()
    with pytest.raises(poptorch.Error, match="floating-point exception") as raised:
        model(torch.ones(2))
    assert "test_control_flow.py" in str(raised.value)
