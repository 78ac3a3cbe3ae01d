"""A process of one peer: reads requests, one JSON object per line, from standard input, and answers each with one line.

Started by `measure.Worker`. Answers go to the original standard output; whatever else prints goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from typing import Any

THREADS = 2
CHECKED_STEPS = 10
CHECKED_LOGITS = 64


class Bench:
    """The runners that this process has set up, by name."""

    def __init__(self) -> None:
        self._runners: dict[str, Any] = {}
        self._calls: dict[str, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operations = {"setup": self._set_up, "round": self._time_round, "task": _run_task}
        return operations[request.pop("op")](**request)

    def _set_up(self, key: str, kind: str, peer: str, variant: str, workload: str, size: int = 0) -> dict[str, Any]:
        """Build a runner, let it compile, and give the values by which it is compared with the others."""
        from benchmarks.peers import INFERERS, TRAINERS
        from benchmarks.workloads import WORKLOADS

        start = time.perf_counter()
        if kind == "train":
            runner = TRAINERS[peer][variant](WORKLOADS[workload])
            calls = -(-CHECKED_STEPS // runner.steps_per_call)
            results = [float(runner.run(0))]
            gradient = _gradient_error(WORKLOADS[workload], runner)
            results += [float(runner.run(call)) for call in range(1, calls)]
            values = {str((call + 1) * runner.steps_per_call): loss for call, loss in enumerate(results)}
        else:
            runner = INFERERS[peer][variant](WORKLOADS[workload], size)
            calls, gradient = 3, None
            logits = [runner.run(call) for call in range(calls)][-1]
            values = {str(i): float(value) for i, value in enumerate(logits.reshape(-1)[:CHECKED_LOGITS])}
        self._runners[key], self._calls[key] = runner, calls
        return {"values": values, "gradient": gradient, "setup_seconds": time.perf_counter() - start}

    def _time_round(self, key: str, seconds: float) -> dict[str, Any]:
        """Call for some time; the answer is the median time of one step in microseconds."""
        runner, call = self._runners[key], self._calls[key]
        gc.collect()
        run, clock, times = runner.run, time.perf_counter, []
        run(call)
        end = clock() + seconds
        while len(times) < 3 or clock() < end:
            call += 1
            start = clock()
            run(call)
            times.append(clock() - start)
        self._calls[key] = call + 1
        return {"us": statistics.median(times) / runner.steps_per_call * 1e6}


def _gradient_error(workload: Any, runner: Any) -> tuple[float, str] | None:
    """The worst error of the first gradient, for runners that show it: PyTorch's, with one step per call."""
    from benchmarks.gradients import worst_gradient_error

    if runner.model is None or runner.steps_per_call > 1:
        return None
    return worst_gradient_error(workload, runner.model, runner.optimizer)


def _run_task(name: str, **arguments: Any) -> dict[str, Any]:
    from benchmarks.tasks import TASKS

    return TASKS[name](**arguments)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(THREADS)
    bench = Bench()
    for line in sys.stdin:
        try:
            answer = bench.answer(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
