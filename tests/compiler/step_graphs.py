"""A training step put together by hand, small enough to know every op of: y = x * w, and w loses a gradient."""

from __future__ import annotations

import torch

from poptorch.ir import Direction, GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Role, StepGraph

aten = torch.ops.aten
FORWARD, BACKWARD, UPDATE = (Note(direction) for direction in Direction)


def step_graph(dtype: torch.dtype = torch.float32, accumulated_as: torch.dtype | None = None) -> StepGraph:
    """The loss is the sum of x * w, so the gradient is x; forward adds 10 to w, and a buffer counts micro-batches."""
    builder = GraphBuilder()
    w = builder.input(InputSpec.of("w", Role.PARAMETER, torch.zeros(2, dtype=dtype)))
    count = builder.input(InputSpec.of("count", Role.BUFFER, torch.zeros(())))
    x = builder.input(InputSpec.of("x", Role.USER_INPUT, torch.zeros(2, dtype=dtype), key="x"))
    y = builder.call(FORWARD, aten.mul.Tensor, x, w)
    moved = builder.call(FORWARD, aten.add.Tensor, w, 10.0)
    gradient = builder.call(BACKWARD, aten.mul.Tensor, x, 1.0)
    builder.output(OutputSpec("output0", OutputRole.USER_OUTPUT), y)
    builder.output(OutputSpec("w", OutputRole.GRADIENT, accumulated_as=accumulated_as), gradient)
    builder.output(OutputSpec("count", OutputRole.NEW_VALUE), builder.call(FORWARD, aten.add.Tensor, count, 1.0))
    builder.output(OutputSpec("w", OutputRole.VALUE_BEFORE_UPDATE), moved)
    builder.output(OutputSpec("w", OutputRole.NEW_VALUE), builder.call(UPDATE, aten.sub.Tensor, moved, gradient))
    return builder.build("step")
