"""`python -m benchmarks`: measure, print one table per kind, and end with an error if a peer crashed or went astray."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import loading, report, single, trainer
from benchmarks.measure import Comparison, Effort, WorkerError, compare_inference, compare_training
from benchmarks.peers import has_jax
from benchmarks.workloads import WORKLOADS, Workload

Result = tuple[list[Any], str]  # the values for --json, and the table


class Bench:
    """One run: which workloads, how carefully, and what went wrong so far."""

    def __init__(self, workloads: list[Workload], quick: bool, named: bool) -> None:
        self.workloads, self.quick = workloads, quick
        self.few = workloads if named or not quick else [w for w in workloads if w.name in ("mlp", "cnn")]
        self.effort = Effort(rounds=5, seconds=0.3) if quick else Effort(rounds=9, seconds=0.6)
        self.problems: list[str] = []

    def train(self) -> Result:
        """Training steps against every peer."""
        peers = ("eager", "compile")
        found = self._compare(peers, ((w.name, lambda w=w: compare_training(w, self.effort)) for w in self.workloads))
        title = "Training: microseconds per step, and how many times faster poptorch is"
        return found, report.comparison_table(title, found, peers)

    def infer(self) -> Result:
        """Forward passes, batch 1 and 32."""
        peers = ("compile",)
        jobs = (
            (f"{w.name} batch {size}", lambda w=w, size=size: compare_inference(w, size, self.effort))
            for w in self.workloads
            if w.infers
            for size in (1, 32)
        )
        found = self._compare(peers, jobs)
        title = "Inference: microseconds per call, and how many times faster poptorch is"
        return found, report.comparison_table(title, found, peers)

    def call(self) -> Result:
        """What a call costs beyond its kernel."""
        found = self._try("call", lambda: single.call_costs(calls=1000 if self.quick else 3000)) or []
        return found, report.call_cost_table(found)

    def update(self) -> Result:
        """The weight update alone."""
        found = self._try("update", lambda: single.update_costs(calls=100 if self.quick else 300)) or []
        return found, report.update_cost_table(found)

    def micro_batches(self) -> Result:
        """Micro-batches of an update one after the other and side by side."""
        small = [w for w in self.few if w.name in ("mlp", "cnn", "embedding-sgd")]
        found = [row for w in small for row in self._try(w.name, lambda w=w: single.side_by_side(w, 2.0)) or []]
        return found, report.side_by_side_table(found)

    def placement(self) -> Result:
        """Stages on threads, replicas folded and recomputation, whatever the workloads."""
        found = self._try("placement", lambda: single.placements(seconds=3.0 if self.quick else 9.0)) or []
        return found, report.placement_table(found)

    def half(self) -> Result:
        """Training in float16 against float32."""
        wide = [w for w in self.workloads if w.dtype is torch.float32]
        rounds = 5 if self.quick else 9
        found = [cost for w in wide if (cost := self._try(w.name, lambda w=w: single.half_cost(w, rounds)))]
        return found, report.half_table(found)

    def compile(self) -> Result:
        """Time to compile, with an empty and a filled cache."""
        times = [self._try(w.name, lambda w=w: single.compile_times(w)) or [] for w in self.few]
        found = [time for pair in times for time in pair]
        return found, report.compile_time_table(found)

    def memory(self) -> Result:
        """Peak memory of training."""
        steps, repeats = (20, 1) if self.quick else (50, 3)
        found = [m for w in self.few if (m := self._try(w.name, lambda w=w: single.peak_memory(w, steps, repeats)))]
        return found, report.memory_table(found)

    def data(self) -> Result:
        """Loading data, whatever the workloads."""
        print("measuring data …", file=sys.stderr, flush=True)
        speeds = [loading.throughput(case, epochs=5 if self.quick else 15) for case in loading.CASES]
        hidden = loading.overlap()
        return [*speeds, hidden], report.loading_table(speeds, hidden)

    def lightning(self) -> Result:
        """A Lightning Trainer on the IPU and on the CPU, whatever the workloads."""
        print("measuring lightning …", file=sys.stderr, flush=True)
        speed = trainer.speed(rounds=2 if self.quick else 5, epochs=4)
        cost = trainer.costs(batches=1000 if self.quick else 3000)
        return [speed, cost], report.trainer_table(speed, cost)

    def _compare(
        self, peers: tuple[str, ...], jobs: Iterator[tuple[str, Callable[[], Comparison]]]
    ) -> list[Comparison]:
        found: list[Comparison] = []
        for name, job in jobs:
            comparison = self._try(name, job)
            if comparison is None:
                continue
            found.append(comparison)
            self.problems += comparison.problems
            if (ratio := comparison.ratio(*peers)) is not None:  # at once: a long run may be ended before its table
                print(f"  {ratio:.2f} times as fast as {' and '.join(peers)}", file=sys.stderr, flush=True)
        return found

    def _try(self, name: str, job: Callable[[], Any]) -> Any:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        try:
            return job()
        except WorkerError as error:
            self.problems.append(f"{name}: {error}")
            return None


KINDS = (
    "train",
    "infer",
    "call",
    "update",
    "micro_batches",
    "placement",
    "half",
    "compile",
    "memory",
    "data",
    "lightning",
)


def main() -> int:
    arguments = _parse()
    names = arguments.only or [name for name, w in WORKLOADS.items() if w.is_small or not arguments.quick]
    bench = Bench([WORKLOADS[name] for name in names], arguments.quick, named=arguments.only is not None)
    results: dict[str, list[Any]] = {}
    _warn_about_load()
    if not has_jax():
        print("JAX is not installed: that peer is left out.\n")
    for kind in arguments.kinds:
        results[kind], text = getattr(bench, kind)()
        print(text, end="\n\n", flush=True)
    if arguments.json:
        plain = {kind: [dataclasses.asdict(value) for value in values] for kind, values in results.items()}
        arguments.json.write_text(json.dumps({**plain, "problems": bench.problems}, indent=1))
    for problem in bench.problems:
        print(f"\nBROKEN: {problem}", file=sys.stderr)
    return 1 if bench.problems else 0


def _warn_about_load() -> None:
    """Other programs on these cores make every number here unreliable, so the reader must know."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"WARNING: the machine is not idle (load average {load:.1f}); ratios below may be far off.\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="poptorch against its peers.")
    parser.add_argument("--quick", action="store_true", help="the small workloads only, and fewer rounds")
    parser.add_argument("--only", type=_choice(WORKLOADS), default=None, metavar="NAMES", help=", ".join(WORKLOADS))
    parser.add_argument("--kinds", type=_choice(KINDS), default=list(KINDS), metavar="KINDS", help=", ".join(KINDS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to this file")
    return parser.parse_args()


def _choice(allowed: Any) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in chosen if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(allowed)}")
        return chosen

    return names


if __name__ == "__main__":
    sys.exit(main())
