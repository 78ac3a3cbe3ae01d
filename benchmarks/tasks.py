"""Measurements that need a process of their own: cost of a call, time to compile, peak memory. Run by `worker`.

Each task takes and returns plain JSON values.
"""

from __future__ import annotations

import cProfile
import importlib
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.half import half_cost
from benchmarks.micro_batches import side_by_side
from benchmarks.placement import placement
from benchmarks.resident import reset_peak, status, trimmed_rss
from benchmarks.timing import interleaved
from benchmarks.updates import update_cost
from benchmarks.workloads import TINY, WORKLOADS

# ---- cost of a call


def call_cost(device_iterations: int, calls: int) -> dict[str, Any]:
    """Time of a call of a tiny model, time of its kernel alone, and where the difference goes."""
    import torch

    import poptorch

    model = TINY.training_model().train()
    options = poptorch.Options().engine("inductor").deviceIterations(device_iterations)
    executor = poptorch.trainingModel(model, options, TINY.optimizer(model))
    batches = TINY.batches(device_iterations)
    batch = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    executor(*batch)
    kernel = kernel_of(executor, list(batches[0]))

    def call() -> None:
        executor(*batch)

    call_us, kernel_us = interleaved((call, kernel), (max(calls // device_iterations, 20), calls))
    step_us = call_us / device_iterations
    return {
        "step_us": step_us,
        "kernel_us": kernel_us,
        "overhead_us": step_us - kernel_us,
        "profile": _profile(call, max(calls // device_iterations, 20), device_iterations),
    }


def kernel_of(executor: Any, tensors: list[Any]) -> Callable[[], Any]:
    """The compiled kernel of a training executor as a function without arguments: nothing of poptorch is in it.

    The only place that knows poptorch's private names.
    """
    run = executor._session._bound.actions[0][1][0]
    (code,) = run._codes
    arguments = [*run._first, *tensors]
    return lambda: code.function(arguments.copy())  # the kernel empties the list it is given


def _profile(call: Callable[[], Any], calls: int, steps_per_call: int) -> list[dict[str, Any]]:
    """The functions in which a step spends its time under cProfile, which makes all of them slower."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    steps = calls * steps_per_call
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # pyright: ignore
    rows = [
        {"where": _place(*key), "us": own / steps * 1e6, "calls": count / steps}
        for key, (_, count, own, _, _) in stats.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:14]


def _place(file: str, line: int, name: str) -> str:
    return name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"


# ---- time to compile


def compile_time(peer: str, workload: str) -> dict[str, Any]:
    """Seconds until the second training step has run: by then everything is compiled, also optimiser state."""
    from benchmarks.peers import TRAINERS

    train = next(iter(TRAINERS[peer].values()))
    _import_compilers()
    start = time.perf_counter()
    runner = train(WORKLOADS[workload])
    runner.run(0)
    runner.run(1)
    return {"seconds": time.perf_counter() - start}


def _import_compilers() -> None:
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "poptorch"):
        importlib.import_module(name)


# ---- memory


def peak_memory(peer: str, workload: str, steps: int) -> dict[str, Any]:
    """How far training raises the resident memory of the process, in MiB.

    The base is taken when all libraries are there, a tiny model was compiled, and this model and its batches exist.
    Three steps later the kernel's high-water mark is reset, so that compiling is not counted in `steps_mib`; it is in
    `process_mib`. What compilation left behind for good is in both.
    """
    from benchmarks.peers import TRAINERS

    _import_compilers()
    train = next(iter(TRAINERS[peer].values()))
    for call in range(3):
        train(TINY).run(call)
    runner = train(WORKLOADS[workload])
    base = trimmed_rss()
    reset_peak()
    for call in range(3):
        runner.run(call)
    first_peak = status("VmHWM")
    trimmed_rss()
    reset_peak()
    for call in range(3, 3 + steps):
        runner.run(call)
    peak = status("VmHWM")
    return {"steps_mib": (peak - base) / 1024, "process_mib": (max(first_peak, peak) - base) / 1024}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "call_cost": call_cost,
    "compile_time": compile_time,
    "peak_memory": peak_memory,
    "update_cost": update_cost,
    "side_by_side": side_by_side,
    "placement": placement,
    "half_cost": half_cost,
}
