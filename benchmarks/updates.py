"""The weight update alone: AdamW of a model with 200 parameter tensors, compiled, against torch's fused kernel.

After gradients were accumulated the compiled update also clears them, so torch is measured with that, too.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

LAYERS = 100  # each a matrix and a vector
WARM_UP = 10


def update_cost(width: int, accumulates: bool, calls: int) -> dict[str, Any]:
    """Microseconds of one update of each: the median of many, measured in turns in one process."""
    import torch

    import poptorch

    class Weights(torch.nn.Module):
        """A forward pass of three ops that reaches every parameter, because only the update is measured."""

        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            shapes = [(width, width), (width,)] * LAYERS
            self.tensors = torch.nn.ParameterList([torch.randn(*s, generator=generator) for s in shapes])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = torch.cat([tensor.reshape(-1) for tensor in self.tensors])
            return poptorch.identity_loss(flat.sum() * x.mean(), reduction="sum")

    model, twin = Weights(), Weights()
    options = poptorch.Options().engine("inductor").runSideBySide(False)  # so that gradients are accumulated
    options.Training.gradientAccumulation(2 if accumulates else 1)
    executor = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters()))
    start = time.perf_counter()
    executor(torch.randn(2 if accumulates else 1))
    compile_s = time.perf_counter() - start
    session: Any = executor._session  # pyright: ignore
    program = session.executable.update or session.executable.step
    kernel = session._kernels[program.name]
    if not accumulates:  # the gradients come from the same program: leave out the part that computes them
        kernel = replace(kernel, shared=None)
    update = kernel.bind([session._bound.replicas[0][spec.name] for spec in program.state], torch.Generator())
    fused = torch.optim.AdamW(twin.parameters(), fused=True)
    for parameter in twin.parameters():
        parameter.grad = torch.randn_like(parameter)

    def fused_step() -> None:
        fused.step()
        if accumulates:
            fused.zero_grad(set_to_none=False)

    peers = {"poptorch": lambda: update([]), "fused": fused_step}
    found: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(WARM_UP + calls):
        for name, run in peers.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    costs = {f"{name}_us": statistics.median(times[WARM_UP:]) * 1e6 for name, times in found.items()}
    return {**costs, "compile_s": compile_s}
