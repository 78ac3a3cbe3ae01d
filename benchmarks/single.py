"""Measurements without interleaving: each value comes from a process of its own. Drives the tasks in `tasks`."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Worker
from benchmarks.placement import KINDS
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class CallCost:
    """What a step of a tiny model costs beyond its kernel."""

    device_iterations: int
    goal_us: float
    step_us: float
    kernel_us: float
    overhead_us: float
    profile: list[dict[str, Any]]


@dataclass(frozen=True)
class CompileTime:
    """Seconds until a workload trains, with an empty cache and with one filled by an earlier process."""

    workload: str
    peer: str
    cold: float
    cached: float


@dataclass(frozen=True)
class Memory:
    """Growth of the resident memory while a workload trains, in MiB per peer; `process` includes compiling."""

    workload: str
    steps: dict[str, float]
    process: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.steps["poptorch"] / self.steps["eager"]


@dataclass(frozen=True)
class UpdateCost:
    """What one AdamW update of 200 parameter tensors takes, and with torch's fused kernel."""

    width: int
    accumulates: bool  # gradients are accumulated, so the update also clears them
    poptorch_us: float
    fused_us: float
    compile_s: float

    @property
    def ratio(self) -> float:
        return self.fused_us / self.poptorch_us


@dataclass(frozen=True)
class SideBySide:
    """Micro-batches of an update one after the other and side by side, and one call with all of their rows."""

    workload: str
    rows: int
    accumulation: int
    replicas: int
    apart_us: float
    together_us: float
    plain_us: float

    @property
    def ratio(self) -> float:
        return self.apart_us / self.together_us


@dataclass(frozen=True)
class HalfCost:
    """A training step in float32, of the model's half(), and of float32 weights with float16 activations."""

    workload: str
    float_us: float
    half_us: float
    mixed_us: float
    goal: float = 1.3  # at most so many times the step in float32

    @property
    def ratios(self) -> tuple[float, float]:
        return self.half_us / self.float_us, self.mixed_us / self.float_us


def half_cost(workload: Workload, rounds: int) -> HalfCost:
    with Worker() as worker:
        return HalfCost(workload.name, **worker.ask(op="task", name="half_cost", workload=workload.name, rounds=rounds))


def side_by_side(workload: Workload, seconds: float, rows: int = 16) -> list[SideBySide]:
    """Four micro-batches for an update, by accumulation and by replicas."""
    found: list[SideBySide] = []
    for accumulation, replicas in ((4, 1), (1, 4)):
        shape = {"rows": rows, "accumulation": accumulation, "replicas": replicas}
        with Worker() as worker:
            answer = worker.ask(op="task", name="side_by_side", workload=workload.name, seconds=seconds, **shape)
        found.append(SideBySide(workload.name, **shape, **answer))
    return found


@dataclass(frozen=True)
class Placed:
    """A step that runs in parts against the plain one."""

    kind: str
    plain_us: float
    other_us: float
    plain_mib: float
    other_mib: float


def placements(seconds: float) -> list[Placed]:
    found: list[Placed] = []
    for kind in KINDS:
        with Worker({"MALLOC_ARENA_MAX": "1"}) as worker:  # else what threads have freed counts as in use
            found.append(Placed(kind, **worker.ask(op="task", name="placement", kind=kind, seconds=seconds)))
    return found


def update_costs(calls: int) -> list[UpdateCost]:
    found: list[UpdateCost] = []
    for width in (64, 256):
        for accumulates in (False, True):
            with Worker() as worker:
                answer = worker.ask(op="task", name="update_cost", width=width, accumulates=accumulates, calls=calls)
            found.append(UpdateCost(width, accumulates, **answer))
    return found


def call_costs(calls: int) -> list[CallCost]:
    found: list[CallCost] = []
    for device_iterations, goal_us in ((1, 60.0), (100, 15.0)):
        with Worker() as worker:
            answer = worker.ask(op="task", name="call_cost", device_iterations=device_iterations, calls=calls)
        found.append(CallCost(device_iterations, goal_us, **answer))
    return found


def compile_times(workload: Workload) -> list[CompileTime]:
    """Every process sees only the cache directory that was made for this peer."""
    found: list[CompileTime] = []
    for peer in ("compile", "poptorch"):
        with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
            cold, cached = (_task(cache, "compile_time", peer=peer, workload=workload.name) for _ in range(2))
        found.append(CompileTime(workload.name, peer, cold["seconds"], cached["seconds"]))
    return found


def peak_memory(workload: Workload, steps: int, repeats: int) -> Memory:
    """The median of some processes per peer; a first one, not counted, fills the cache."""
    answers: dict[str, list[dict[str, float]]] = {"eager": [], "poptorch": []}
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        _task(cache, "compile_time", peer="poptorch", workload=workload.name)
        for _ in range(repeats):
            for peer, found in answers.items():
                found.append(_task(cache, "peak_memory", peer=peer, workload=workload.name, steps=steps))
    medians = {
        key: {peer: statistics.median(answer[key] for answer in found) for peer, found in answers.items()}
        for key in ("steps_mib", "process_mib")
    }
    return Memory(workload.name, medians["steps_mib"], medians["process_mib"])


def _task(cache: str, name: str, **arguments: Any) -> dict[str, Any]:
    with Worker({"TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}) as worker:
        return worker.ask(op="task", name=name, **arguments)
