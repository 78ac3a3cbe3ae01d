"""`python -m benchmarks.versions OTHER/src`: this checkout against another one, in turns, as ratios of time.

Above 1 this checkout is faster. Both run the workloads of this checkout's benchmark, so the other one must understand
the same programs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks.measure import Worker, WorkerError
from benchmarks.workloads import WORKLOADS, Workload

HERE = Path(__file__).parent.parent
ROUNDS = 9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("other", type=Path, help="the folder that holds the other version's poptorch")
    parser.add_argument("--only", default=",".join(WORKLOADS), metavar="NAMES", help="workloads, with commas")
    parser.add_argument("--kinds", default="train,infer", metavar="KINDS", help="train and infer, with commas")
    arguments = parser.parse_args()
    print("workload                      other us     this us   ratio   other setup s   this setup s")
    for name in arguments.only.split(","):
        for kind in arguments.kinds.split(","):
            if kind == "train" or WORKLOADS[name].infers:
                print(_row(WORKLOADS[name], kind, arguments.other), flush=True)
    return 0


def _row(workload: Workload, kind: str, other: Path) -> str:
    """Times of a step with both versions: medians over rounds taken in turns."""
    sources = {"other": other.resolve(), "this": HERE / "src"}
    workers = {name: Worker({"PYTHONPATH": os.pathsep.join([str(s), str(HERE)])}) for name, s in sources.items()}
    label = f"{workload.name} {kind}"
    try:
        setup = {}
        for name, worker in workers.items():  # one after the other, because compiling uses all cores
            variant = "D=1" if kind == "train" else "default"
            request = {"kind": kind, "peer": "poptorch", "variant": variant, "workload": workload.name, "size": 32}
            setup[name] = worker.ask(op="setup", key="only", **request)["setup_seconds"]
        rounds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(ROUNDS):
            for name, worker in workers.items():
                rounds[name].append(worker.ask(op="round", key="only", seconds=0.4)["us"])
    except WorkerError as error:
        return f"{label:<26}  {error}"
    finally:
        for worker in workers.values():
            worker.__exit__()
    times = {name: statistics.median(found) for name, found in rounds.items()}
    ratio = times["other"] / times["this"]
    seconds = f"{setup['other']:>14.1f}  {setup['this']:>13.1f}"
    return f"{label:<26}  {times['other']:>9.1f}  {times['this']:>10.1f}  {ratio:>6.2f}  {seconds}"


if __name__ == "__main__":
    sys.exit(main())
