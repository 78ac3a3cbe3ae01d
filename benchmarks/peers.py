"""The programs that are compared. A peer is a way to train and to run a model; some have variants, the best one counts.

Each factory takes a workload and gives a `Runner`: a function of the number of the call. Call number i uses the
batches that follow those of call i - 1, so all runners of a workload see the same data in the same order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Batch, Workload

POOL = 8  # batches that are cycled through


@dataclass(frozen=True)
class Runner:
    """Something to time: `run(i)` makes one call of `steps_per_call` steps and returns what the last step returned."""

    run: Callable[[int], Any]
    steps_per_call: int = 1
    model: nn.Module | None = None  # of a PyTorch trainer, with its optimiser: what the gradient check looks at
    optimizer: torch.optim.Optimizer | None = None


Trainer = Callable[[Workload], Runner]
Inferer = Callable[[Workload, int], Runner]


# ---- eager PyTorch


def train_eager(workload: Workload, **optimizer_options: bool) -> Runner:
    """The loop that everybody writes; `fused=True` picks the one-kernel optimiser of PyTorch."""
    model = workload.training_model().train()
    optimizer = workload.optimizer(model, **optimizer_options)
    return _loop(workload, model, optimizer, model, optimizer.step)


def _loop(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, forward: Any, step: Callable[[], Any]
) -> Runner:
    """The loop with the model's forward and the optimiser's step as they are, or compiled."""
    batches = workload.batches(POOL)

    def run(call: int) -> Tensor:
        x, y = batches[call % POOL]
        optimizer.zero_grad()
        loss = forward(x, y)[1]
        loss.backward()
        step()
        return loss.detach()

    return Runner(run, 1, model, optimizer)


def infer_eager(workload: Workload, size: int) -> Runner:
    return _forward(workload, size, workload.network().eval())


def _forward(workload: Workload, size: int, model: Any) -> Runner:
    inputs = [x for x, _ in workload.batches(POOL, size)]

    def run(call: int) -> Tensor:
        with torch.no_grad():
            return model(inputs[call % POOL])

    return Runner(run)


# ---- torch.compile


def train_compile_parts(workload: Workload, **inductor_options: Any) -> Runner:
    """`torch.compile` of the model with its loss, and of the optimiser's step."""
    model = workload.training_model().train()
    optimizer = workload.optimizer(model)
    compiled = torch.compile(model, options=inductor_options or None)
    return _loop(workload, model, optimizer, compiled, torch.compile(optimizer.step))


def train_compile_step(workload: Workload) -> Runner:
    """`torch.compile` of one function that does everything; it breaks at `backward()` and at the optimiser."""
    model = workload.training_model().train()
    optimizer = workload.optimizer(model)
    batches = workload.batches(POOL)

    @torch.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y)[1]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Runner(lambda call: step(*batches[call % POOL]), 1, model, optimizer)


def infer_compile(workload: Workload, size: int, **inductor_options: Any) -> Runner:
    model = torch.compile(workload.network().eval(), options=inductor_options or None)
    return _forward(workload, size, model)


# ---- poptorch


def train_poptorch(workload: Workload, device_iterations: int = 1, engine: str = "inductor") -> Runner:
    """`poptorch.trainingModel`; several batches per call if asked to."""
    import poptorch

    model = workload.training_model().train()
    options = poptorch.Options().engine(engine).deviceIterations(device_iterations)
    optimizer = workload.optimizer(model)
    executor = poptorch.trainingModel(model, options, optimizer)
    batches = workload.batches(POOL)
    calls = [_joined(batches, call * device_iterations, device_iterations) for call in range(POOL)]
    return Runner(lambda call: executor(*calls[call % POOL])[1], device_iterations, model, optimizer)


def _joined(batches: list[Batch], start: int, count: int) -> Batch:
    chosen = [batches[(start + index) % POOL] for index in range(count)]
    return torch.cat([x for x, _ in chosen]), torch.cat([y for _, y in chosen])


def infer_poptorch(workload: Workload, size: int) -> Runner:
    import poptorch

    executor = poptorch.inferenceModel(workload.network().eval(), poptorch.Options().engine("inductor"))
    return _forward(workload, size, executor)


# ---- JAX, where it is installed


def has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def train_jax(workload: Workload) -> Runner:
    from benchmarks.jax_peer import train

    return train(workload)


def infer_jax(workload: Workload, size: int) -> Runner:
    from benchmarks.jax_peer import infer

    return infer(workload, size)


_KEEP_LAYOUT = "no layout optimization"
JAX_WORKLOADS = frozenset({"mlp", "mlp-b64", "embedding-sgd", "embedding-adamw", "cnn", "cnn-wide", "lstm"})

TRAINERS: dict[str, dict[str, Trainer]] = {
    "eager": {"plain": train_eager, "fused": lambda workload: train_eager(workload, fused=True)},
    "compile": {
        "model + optimizer": train_compile_parts,
        "whole step": train_compile_step,
        # torch 2.13 computes wrong gradients for `cnn-wide` when Inductor chooses channels-last by itself
        _KEEP_LAYOUT: lambda workload: train_compile_parts(workload, layout_optimization=False),
    },
    "poptorch": {"D=1": train_poptorch},
    "poptorch-D10": {"D=10": lambda workload: train_poptorch(workload, 10)},
    "jax": {"jit": train_jax},
}

INFERERS: dict[str, dict[str, Inferer]] = {
    "eager": {"no_grad": infer_eager},
    "compile": {
        "default": infer_compile,
        "freezing": lambda workload, size: infer_compile(workload, size, freezing=True),
    },
    "poptorch": {"default": infer_poptorch},
    "jax": {"jit": infer_jax},
}


def peers_for(workload: Workload) -> list[str]:
    """The peers that can run a workload here, in the order in which they are measured."""
    return [peer for peer in TRAINERS if peer != "jax" or (workload.name in JAX_WORKLOADS and has_jax())]


def training_variants(peer: str, workload: Workload) -> list[str]:
    """The variants of a peer that make sense for a workload."""
    return [variant for variant in TRAINERS[peer] if variant != _KEEP_LAYOUT or workload.convolves]
