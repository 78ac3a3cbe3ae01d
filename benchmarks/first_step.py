"""`python -m benchmarks.first_step`: how long the first call of a model takes, with us and with `torch.compile`.

Each first call happens in a fresh process with empty folders for generated code, so nothing was compiled before. What
is compiled once per machine (the headers) is made first, and its cost printed. Wall seconds depend on what else the
machine does; seconds of processors (of the process and of all compilers that it started) depend on that much less. The
peak is the memory of all compilers together, looked at twenty times a second. With `--depth` the models are stacks of
equal layers, of several heights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
TIMEOUT = 1800
WORKLOADS = ("mlp", "cnn", "lstm", "bert-mini", "parameters-200")
DEPTHS = {"encoder": (4, 12, 24, 48), "residual": (8, 50)}
GOALS = {"cnn": 8.0, "bert-mini": 15.0, "parameters-200": 20.0, "bert-base-12": 30.0}
RATIO_GOAL = 0.5


@dataclass(frozen=True)
class FirstCall:
    """What it took until a model had trained for one step."""

    wall: float
    cpu: float
    peak_mib: float
    loss: float
    step_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help="workloads, with commas; encoder-12 has twelve layers, bert-base-12 is BERT-base",
    )
    parser.add_argument("--depth", action="store_true", help="stacks of equal layers instead of the usual workloads")
    parser.add_argument(
        "--peers", default="poptorch,compile", metavar="NAMES", help="poptorch, compile and tiered, with commas"
    )
    parser.add_argument("--other", type=Path, metavar="SRC", help="the folder of another poptorch, as a third peer")
    parser.add_argument("--worker", nargs=2, metavar=("PEER", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(first_call(*arguments.worker)))
        return 0
    names = arguments.only.split(",") if arguments.only else _all_names(arguments.depth)
    peers = arguments.peers.split(",") + (["other"] if arguments.other else [])
    if "poptorch" in peers:
        print(f"headers, once per machine: {_run('headers', '', None)['wall']:.1f} s")
    print(
        f"{'workload':<16}" + "".join(f"{peer:>9} s {'cpu s':>7} {'MiB':>5} {'step ms':>8}" for peer in peers), end=""
    )
    print("   ratio  cpu ratio  goal")
    for name in names:
        print(_row(name, peers, arguments.other), flush=True)
    return 0


def _all_names(by_depth: bool) -> list[str]:
    if not by_depth:
        return list(WORKLOADS)
    return [f"{kind}-{layers}" for kind, depths in DEPTHS.items() for layers in depths]


def _row(name: str, peers: list[str], other: Path | None) -> str:
    found: dict[str, FirstCall] = {}
    line = f"{name:<16}"
    for peer in peers:
        try:
            found[peer] = FirstCall(**_run(peer, name, other))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return f"{line} {peer} failed: {error}"
        call = found[peer]
        line += f"{call.wall:>9.1f}   {call.cpu:>7.1f} {call.peak_mib:>5.0f} {call.step_ms:>8.2f}"
    losses = [call.loss for call in found.values()]
    if max(losses) - min(losses) > 1e-3 * max(map(abs, losses)):
        line += f"   DIFFERENT LOSSES: {losses}"
    if {"poptorch", "compile"} <= found.keys():
        ours, theirs = found["poptorch"], found["compile"]
        line += f"   {ours.wall / theirs.wall:>5.2f}  {ours.cpu / theirs.cpu:>9.2f}"
        line += f"  ≤ {RATIO_GOAL}" + (f", ≤ {GOALS[name]:.0f} s" if name in GOALS else "")
    return line


def _run(peer: str, name: str, other: Path | None) -> dict[str, Any]:
    """One first call, in a process with caches of its own."""
    source = other.resolve() if peer == "other" and other else HERE / "src"
    with tempfile.TemporaryDirectory(prefix="bench-first-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), str(HERE)]),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "POPTORCH_CACHE_DIR": str(Path(folder, "poptorch")),
        }
        command = [sys.executable, "-m", "benchmarks.first_step", "--worker", peer, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- inside the process that is measured


def first_call(peer: str, name: str) -> dict[str, Any]:
    import resource
    import statistics
    import time

    if peer == "headers":
        return {"wall": _build_headers()}
    import torch

    from benchmarks.peers import train_compile_step, train_poptorch
    from benchmarks.worker import THREADS

    torch.set_num_threads(THREADS)
    engine = "tiered" if peer == "tiered" else "inductor"
    workload = find_workload(name)
    runner = train_compile_step(workload) if peer == "compile" else train_poptorch(workload, engine=engine)

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    before, start = cpu(), time.perf_counter()
    with _peak_of_compilers() as peak:
        loss = float(runner.run(0))
    wall, used = time.perf_counter() - start, cpu() - before
    times = []
    for call in range(1, 12):
        start = time.perf_counter()
        runner.run(call)
        times.append(time.perf_counter() - start)
    return {"wall": wall, "cpu": used, "peak_mib": max(peak), "loss": loss, "step_ms": statistics.median(times) * 1e3}


@contextmanager
def _peak_of_compilers() -> Iterator[list[float]]:
    """Gives a list that receives how many MiB the compilers of this process took, again and again."""
    found, ended = [0.0], threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            found.append(_compilers_nbytes() / 2**20)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _compilers_nbytes() -> int:
    """Resident bytes of the descendants of this process that compile, assemble or link."""
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            parents[int(folder.name)] = int(fields[1])
            if name in ("cc1plus", "as", "ld", "clang", "clang++", "ld.gold"):
                sizes[int(folder.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return sum(size for number, size in sizes.items() if _descends(number, parents))


def _descends(number: int, parents: dict[int, int]) -> bool:
    while number > 1 and number != os.getpid():
        number = parents.get(number, 0)
    return number == os.getpid()


def _build_headers() -> float:
    """Seconds that it takes to have the headers; none if they are there."""
    import time

    from benchmarks.peers import train_poptorch
    from poptorch.engines.headers import BACKGROUND

    train_poptorch(find_workload("tiny")).run(0)
    start = time.perf_counter()
    BACKGROUND.wait(600)
    return time.perf_counter() - start


def find_workload(name: str) -> Any:
    """A workload of the other benchmarks, or a stack of layers such as `encoder-12`."""
    from benchmarks import workloads

    found = {**workloads.WORKLOADS, "tiny": workloads.TINY}
    if name in found:
        return found[name]
    kind, _, count = name.rpartition("-")
    makers = {"encoder": _encoder, "residual": _residual, "bert-base": _bert_base, "parameters": _many_parameters}
    return makers[kind](name, int(count))


def _encoder(name: str, layers: int) -> Any:
    """PyTorch's own encoder layers, 64 wide, over eight tokens of 32 features."""
    from torch import nn

    from benchmarks.workloads import Workload, adamw, features

    def network() -> nn.Module:
        stack = [
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)
        ]
        return nn.Sequential(nn.Linear(32, 64), *stack, nn.Flatten(), nn.Linear(8 * 64, 10))

    return Workload(name, network, features(8, 32), adamw, 16, goal=1.0)


def _bert_base(name: str, layers: int) -> Any:
    """A model of the size of BERT-base, with dropout: 768 wide, a vocabulary of 30522, and a head with its weights."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from benchmarks.workloads import Workload, adamw

    width, vocabulary, tokens = 768, 30522, 128

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
            self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
            self.layers = nn.Sequential(
                *(
                    nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
                    for _ in range(layers)
                )
            )
            self.transform, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width)
            self.bias = nn.Parameter(torch.zeros(vocabulary))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(self.dropout(self.norm(self.words(x) + self.places.weight)))
            return F.linear(self.last_norm(F.gelu(self.transform(y))), self.words.weight, self.bias)

    def masked(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        original = torch.randint(1, vocabulary, (size, tokens), generator=generator)
        hidden = torch.rand(size, tokens, generator=generator) < 0.15
        return original.masked_fill(hidden, 0), original.masked_fill(~hidden, -100)

    return Workload(name, Bert, masked, adamw, 2, goal=1.0)


def _residual(name: str, layers: int) -> Any:
    """Residual blocks of two convolutions each, 16 channels wide, on images of 16 × 16; two layers are one block."""
    from torch import nn

    from benchmarks.workloads import Residual, Workload, features, slow_sgd

    def network() -> nn.Module:
        blocks = [Residual(16, 16, 1) for _ in range(layers // 2)]
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
        )

    return Workload(name, network, features(3, 16, 16), slow_sgd, 8, goal=1.0, convolves=True)


def _many_parameters(name: str, count: int) -> Any:
    """A deep and narrow network with this many parameter tensors, of eight shapes."""
    from torch import nn

    from benchmarks.workloads import Workload, adamw, features

    def network() -> nn.Module:
        widths = [32 + 8 * (layer % 4) for layer in range(count // 2)]
        layers: list[nn.Module] = []
        for width_in, width in zip([32, *widths], [*widths[:-1], 10], strict=False):
            layers += [nn.Linear(width_in, width), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return Workload(name, network, features(32), adamw, 16, goal=1.0)


if __name__ == "__main__":
    sys.exit(main())
