"""What a second process brings: samples per second of one process and of two, with one thread each.

    python -m benchmarks.processes [--engine inductor] [--seconds 2] [--workloads cnn bert-mini]

Rounds of one process, during which the other sleeps, and rounds of both take turns. Bytes do not depend on what else
the machine does. The ratio of samples per second does, and needs two cores that are free: what is shown are the medians
of the rounds in which others used the machine least, and how many cores they used even then. The bound is the ratio
that a program would have that takes, beside the time of one process, only that of a bare `all_reduce` of its gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import poptorch
from benchmarks.workloads import WORKLOADS
from poptorch.executable import Reduce
from poptorch.processes import find_place

PROCESSES, ROUNDS, QUIET = 2, 18, 6
_ACKNOWLEDGED = 120  # where Linux's `struct tcp_info` has the bytes that were sent and arrived


@dataclass(frozen=True)
class Scaling:
    """One workload in two processes, against one; times are milliseconds of one update."""

    workload: str
    alone_ms: float
    together_ms: float  # an update with twice the samples
    alone_cpu_ms: float
    together_cpu_ms: float  # of each process
    reduce_ms: float  # of it, to add up gradients, waiting included
    bare_ms: float  # of an all-reduce of as many bytes, when nothing else is done
    others: float  # cores that other programs used meanwhile
    sent: float  # bytes of each process and update
    least: float  # that an all-reduce of these gradients sends at least

    @property
    def ratio(self) -> float:
        """Samples per second of two processes, against one."""
        return PROCESSES * self.alone_ms / self.together_ms

    @property
    def bound(self) -> float:
        """The ratio if a second process cost nothing but an all-reduce."""
        return PROCESSES * self.alone_ms / (self.alone_ms + self.bare_ms)

    def __str__(self) -> str:
        cpu = self.together_cpu_ms / self.alone_cpu_ms
        numbers = (self.ratio, self.bound, self.alone_ms, self.together_ms, self.reduce_ms, self.bare_ms, cpu)
        sizes = (self.sent / 1e6, self.least / 1e6)
        columns = [f"{x:>8.2f}" for x in numbers] + [f"{x:>9.3f}" for x in sizes] + [f"{self.others:>8.2f}"]
        return f"{self.workload:<12}{''.join(columns)}"


@dataclass(frozen=True)
class Round:
    """Seconds of a call, of its processor time, and how many cores other programs used meanwhile."""

    wall: float
    cpu: float
    others: float
    reduce: float = 0.0


@dataclass(frozen=True)
class Network:
    """What a message between two processes takes: milliseconds for the first byte, and bytes per millisecond."""

    start_ms: float
    speed: float

    @classmethod
    def measured(cls) -> Network:
        """From all-reduces of a small and of a large tensor between two processes, the fastest of each."""
        small, large = 64, 2**22
        times = {size: min(_round(_reducing(size), 5)[0] for _ in range(5)) for size in (small, large)}
        speed = 4 * (large - small) / (1e3 * max(1e-6, times[large] - times[small]))
        return cls(1e3 * times[small] / 2, speed)

    def all_reduce_ms(self, nbytes: float, processes: int) -> float:
        """What a ring of processes takes: each sends 2 (P - 1) messages, of a P-th of the bytes each."""
        steps = 2 * (processes - 1)
        return steps * (self.start_ms + nbytes / processes / self.speed)


def prediction(found: Scaling, network: Network) -> list[str]:
    """What more processes, each on a core of its own, would bring; computed, not measured.

    As the schedule is: gradients are added up after the micro-batches of an update, one or sixteen. And if all of the
    exchange could hide behind the computation of one.
    """
    yields = f"{'G=1':>8}{'hidden':>8}{'G=16':>8}"
    lines = [f"  {'processes':>9}{'reduce ms':>12}{'speed-up':>10}   of ideal:{yields}   (computed from these numbers)"]
    for processes in (2, 8, 64, 1024):
        reduce = network.all_reduce_ms(found.least * PROCESSES / 2 / (PROCESSES - 1), processes)
        one = found.alone_ms
        shares = (one / (one + reduce), one / max(one, reduce), 16 * one / (16 * one + reduce))
        columns = "".join(f"{share:>8.0%}" for share in shares)
        lines.append(f"  {processes:>9}{reduce:>12.2f}{processes * shares[0]:>10.1f}{'':>12}{columns}")
    return lines


def _reducing(size: int) -> Callable[[], Any]:
    values = torch.zeros(size)
    return lambda: distributed.all_reduce(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--workloads", nargs="+", default=["cnn", "bert-mini"], choices=list(WORKLOADS))
    given = parser.parse_args()
    if "RANK" not in os.environ:
        _start(sys.argv[1:])
        return
    torch.set_num_threads(1)
    if find_place().index == 0:
        columns = ["ratio", "bound", "1 ms", "2 ms", "reduce", "bare", "CPU", "MB sent", "MB least", "others"]
        widths = [8, 8, 8, 8, 8, 8, 8, 9, 9, 8]
        titles = "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
        print(f"{'workload':<12}{titles}", flush=True)
    for name in given.workloads:
        found = measure(name, given.engine, given.seconds)
        network = Network.measured()
        if find_place().index == 0:
            print(found, flush=True)
            for line in prediction(found, network):
                print(line, flush=True)
            print(json.dumps({**asdict(found), **asdict(network)}), file=sys.stderr)


def _start(arguments: list[str]) -> None:
    """Be the launcher: two processes with a thread each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": PROCESSES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    command = [sys.executable, "-m", "benchmarks.processes", *arguments]
    own = [{**shared, "RANK": rank, "LOCAL_RANK": rank, "POPTORCH_TIMEOUT": 600} for rank in range(PROCESSES)]
    texts = [{name: str(value) for name, value in each.items()} for each in own]
    started = [subprocess.Popen(command, env={**os.environ, **each}) for each in texts]
    sys.exit(max(process.wait() for process in started))


def measure(name: str, engine: str, seconds: float) -> Scaling:
    """The medians of those rounds, which take turns, in which the machine did least for others."""
    (alone, _), (together, trace) = _call(name, engine, 1), _call(name, engine, PROCESSES)
    count = _updates(together, seconds)
    ones, twos, sent = list[Round](), list[Round](), 0
    for _ in range(ROUNDS):
        ones.append(_watched(alone if find_place().index == 0 else None, count))
        before = _bytes_sent()
        found = _watched(together, count)
        sent += _bytes_sent() - before
        spans = [span for span in trace().spans if isinstance(span.instruction, Reduce)]
        twos.append(replace(found, reduce=sum(span.end - span.begin for span in spans)))
    model = WORKLOADS[name].training_model()
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    one, two = _typical(ones), _typical(twos)
    return Scaling(
        name,
        1e3 * one.wall,
        1e3 * two.wall,
        1e3 * one.cpu,
        1e3 * two.cpu,
        reduce_ms=1e3 * two.reduce,
        bare_ms=1e3 * min(_round(_reducing(gradients // 4), 20)[0] for _ in range(5)),
        others=max(one.others, two.others),
        sent=sent / ROUNDS / count,
        least=2 * (PROCESSES - 1) / PROCESSES * gradients,
    )


def _watched(call: Callable[[], Any] | None, count: int) -> Round:
    """A round of this process, or none, while the others have one or none too."""
    distributed.barrier()
    begun, busy = time.perf_counter(), _busy()
    wall, cpu = (0.0, 0.0) if call is None else _round(call, count)
    elapsed, busy = time.perf_counter() - begun, _busy() - busy
    ours = torch.tensor([cpu * count])
    distributed.all_reduce(ours)
    return Round(wall, cpu, max(0.0, busy - float(ours)) / elapsed)


def _typical(rounds: Sequence[Round]) -> Round:
    """The medians of the quietest rounds."""
    quiet = sorted(rounds, key=lambda each: each.others)[:QUIET]
    columns = zip(*((each.wall, each.cpu, each.others, each.reduce) for each in quiet), strict=True)
    return Round(*(statistics.median(column) for column in columns))


def _call(name: str, engine: str, processes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A training step, of this process or of all, and the trace of its last call."""
    workload = WORKLOADS[name]
    options = poptorch.Options().engine(engine)
    if processes == 1:
        options.Distributed.disable()
    model = workload.training_model()
    training = poptorch.trainingModel(model, options, workload.optimizer(model))
    (batch,) = workload.batches(1)
    for _ in range(3):
        training(*batch)
    return lambda: training(*batch), lambda: training._compiled().trace


def _updates(call: Callable[[], Any], seconds: float) -> int:
    """How many calls a round has: the same number in all processes."""
    wall, _ = _round(call, 5)
    count = torch.tensor([max(3, int(seconds / wall))])
    distributed.broadcast(count, 0)
    return int(count)


def _round(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Seconds of a call, and seconds of the processor."""
    begun, cpu = time.perf_counter(), _cpu()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count, (_cpu() - cpu) / count


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _busy() -> float:
    """Seconds for which the cores of this machine have worked, for anybody; 0 where that is not known."""
    try:
        _, user, nice, system, _, _, interrupts, soft, *_ = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, interrupts, soft))) / os.sysconf("SC_CLK_TCK")


def _bytes_sent() -> int:
    """What this process has sent by TCP."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        if not _is_socket(link):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, _ACKNOWLEDGED)[0]
    return total


def _is_socket(link: Path) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except OSError:  # that by which the folder was read
        return False


if __name__ == "__main__":
    main()
