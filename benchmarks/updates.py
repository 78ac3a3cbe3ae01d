"""The weight update alone: AdamW of a model with 200 parameter tensors, compiled, against torch's fused kernel.

The compiled update also clears the gradients, for the next accumulation, so torch is measured with and without that.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

LAYERS = 100  # each a matrix and a vector
ROUNDS = 9


def update_cost(width: int, calls: int) -> dict[str, Any]:
    """Microseconds of one update of each, measured in turns in one process; medians over the rounds."""
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
    options = poptorch.Options().engine("inductor")
    options.Training.gradientAccumulation(2)  # makes the update a program of its own
    executor = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters()))
    start = time.perf_counter()
    executor(torch.randn(2))
    compile_s = time.perf_counter() - start
    update: Any = executor._session._updates[0]  # pyright: ignore
    fused = torch.optim.AdamW(twin.parameters(), fused=True)
    for parameter in twin.parameters():
        parameter.grad = torch.randn_like(parameter)

    def step_and_clear() -> None:
        fused.step()
        fused.zero_grad(set_to_none=False)

    peers = {"poptorch": lambda: update([]), "fused": fused.step, "cleared": step_and_clear}
    found: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(ROUNDS + 1):
        for name, run in peers.items():
            times: list[float] = []
            for _ in range(calls):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            found[name].append(statistics.median(times) * 1e6)
    costs = {f"{name}_us": statistics.median(times[1:]) for name, times in found.items()}  # the first round warms up
    return {**costs, "compile_s": compile_s}
