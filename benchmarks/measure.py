"""Drive the workers: interleaved rounds, medians, and the check that every peer computes the same thing."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import gradients
from benchmarks.peers import INFERERS, peers_for, training_variants
from benchmarks.worker import THREADS
from benchmarks.workloads import Workload

Statistic = Callable[[Sequence[float]], float]

RTOL = {torch.float32: 1e-3, torch.float16: 2e-2}
LOGITS_ATOL = {torch.float32: 1e-4, torch.float16: 2e-3}


class WorkerError(RuntimeError):
    """A worker answered with an exception, or died."""


class Worker:
    """One process of one peer."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        threads = str(THREADS)
        own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "POPTORCH_LOG_LEVEL": "ERR"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **own, **(environment or {})},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the worker is gone, exit code {self._process.wait()}") from None

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker died, exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.receive()


@dataclass
class PeerResult:
    """What one peer did: per variant its checked values, its time in each round, or why it failed."""

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def times(self, of: Statistic = statistics.median) -> dict[str, float]:
        """The median (or another statistic) over the rounds for each variant that worked, in microseconds."""
        return {variant: of(times) for variant, times in self.rounds.items() if times}

    def add(self, variant: str, values: dict[str, float], gradient: tuple[float, str] | None) -> None:
        """A variant that is set up; one whose first gradient is wrong is not worth timing."""
        if gradient is not None and not gradient[0] <= gradients.RTOL:
            error, parameter = gradient
            self.add_failure(variant, f"WRONG GRADIENT of {parameter}: relative error {error:.2g} to float64")
        else:
            self.values[variant], self.rounds[variant] = values, []

    def add_failure(self, variant: str, why: str) -> None:
        self.failures[variant] = why
        self.values.pop(variant, None)
        self.rounds.pop(variant, None)


@dataclass
class Comparison:
    """One row of a table: a workload, and how long a step takes with each peer."""

    workload: str
    batch_size: int
    goal: float
    peers: dict[str, PeerResult]

    def time(self, peer: str, of: Statistic = statistics.median) -> float | None:
        """The time of the fastest variant of a peer."""
        return min(self.peers[peer].times(of).values(), default=None) if peer in self.peers else None

    def ratio(self, *peers: str, of: Statistic = statistics.median) -> float | None:
        """How many times faster poptorch is than the fastest of these peers."""
        ours = self.time("poptorch", of)
        others = [time for peer in peers if (time := self.time(peer, of)) is not None]
        return None if ours is None or not others else min(others) / ours

    @property
    def problems(self) -> list[str]:
        """Failures that make the row worthless: a peer of which no variant runs and computes what eager computes."""
        return [
            f"{self.workload} (batch {self.batch_size}), {name} [{variant}]: {why.strip()}"
            for name, peer in self.peers.items()
            for variant, why in peer.failures.items()
            if not peer.rounds
        ]

    @property
    def notes(self) -> list[str]:
        """Variants that are left out because they fail, although their peer has another that works."""
        return [
            f"{self.workload} (batch {self.batch_size}): {name} [{variant}] is left out: {_last_line(why)}"
            for name, peer in self.peers.items()
            for variant, why in peer.failures.items()
            if peer.rounds
        ]


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:200]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds: float


def compare_training(workload: Workload, effort: Effort) -> Comparison:
    """Time a training step of a workload with every peer."""
    peers = [peer for peer in peers_for(workload) if workload.is_small or peer != "poptorch-D10"]
    variants = {peer: training_variants(peer, workload) for peer in peers}
    results = _measure("train", workload, workload.batch_size, variants, effort)
    _check(results, "eager", RTOL[workload.dtype])
    return Comparison(workload.name, workload.batch_size, workload.goal, results)


def compare_inference(workload: Workload, size: int, effort: Effort) -> Comparison:
    """Time a forward pass of a workload with every peer."""
    variants = {peer: list(INFERERS[peer]) for peer in peers_for(workload) if peer in INFERERS}
    results = _measure("infer", workload, size, variants, effort)
    _check(results, "eager", RTOL[workload.dtype], LOGITS_ATOL[workload.dtype])
    return Comparison(workload.name, size, 1.0, results)


def _measure(
    kind: str, workload: Workload, size: int, variants: dict[str, list[str]], effort: Effort
) -> dict[str, PeerResult]:
    results = {peer: PeerResult() for peer in variants}
    workers = {peer: Worker() for peer in variants}
    try:
        for peer, worker in workers.items():  # all compile at the same time
            for variant in variants[peer]:
                request = {"kind": kind, "peer": peer, "variant": variant, "workload": workload.name, "size": size}
                worker.send(op="setup", key=variant, **request)
        for peer, worker in workers.items():
            for variant in variants[peer]:
                try:
                    answer = worker.receive()
                    results[peer].add(variant, answer["values"], answer["gradient"])
                except WorkerError as error:
                    results[peer].add_failure(variant, str(error))
        for _ in range(effort.rounds):
            for peer, worker in workers.items():
                _time_round(worker, results[peer], effort.seconds)
    finally:
        for worker in workers.values():
            worker.__exit__()
    return results


def _time_round(worker: Worker, result: PeerResult, seconds: float) -> None:
    for variant in list(result.rounds):
        try:
            result.rounds[variant].append(worker.ask(op="round", key=variant, seconds=seconds)["us"])
        except WorkerError as error:
            result.add_failure(variant, str(error))
        time.sleep(0.02)  # threads of the process that was just measured stop spinning


def _check(results: dict[str, PeerResult], reference: str, rtol: float, atol: float = 0.0) -> None:
    """Mark the variants whose values differ from the first variant of the reference."""
    if not results[reference].values:
        return
    expected = next(iter(results[reference].values.values()))
    for result in results.values():
        for variant, values in list(result.values.items()):
            common = [key for key in values if key in expected]
            wrong = [key for key in common if not math.isclose(values[key], expected[key], rel_tol=rtol, abs_tol=atol)]
            if wrong or not common:
                table = ", ".join(f"{key}: {values[key]:.6g} (expected {expected[key]:.6g})" for key in wrong[:10])
                result.add_failure(variant, f"MISMATCH with {reference}: {table}")
