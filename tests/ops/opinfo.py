"""PyTorch's own samples of its operations (the OpInfo database), run by poptorch and compared with eager PyTorch.

`python tests/ops/opinfo.py` runs everything and prints the failures and the shares; `--help` shows how to run a part.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db as all_ops
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import poptorch
from ops.against_eager import SEED, Called, Together, difference, run, run_eager, train, train_eager

SECONDS_PER_SAMPLE = 60
OTHER_TYPES = (torch.int64, torch.bool, torch.complex64)  # for the few operations that have no float32

OPS: tuple[OpInfo, ...] = tuple(op for op in all_ops if op.dtypes)  # the others need another device

# Tensors whose values nobody has written: only their shapes and types can be compared.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True)
class Outcome:
    """What became of one sample."""

    op: str
    index: int
    part: str  # "forward", "backward", or "in place": forward, by the method that changes its tensor
    status: str  # "ok", "refused" by a poptorch.Error, "wrong", "crashed", or "eager": PyTorch cannot do it either
    detail: str = ""


def dtype_of(op: OpInfo) -> torch.dtype:
    """float32, or the first other type that an operation without float32 has."""
    return next(dtype for dtype in (torch.float32, *OTHER_TYPES, *op.dtypes) if dtype in op.dtypes)


def samples(op: OpInfo, most: int | None, *, training: bool) -> Iterator[tuple[int, SampleInput]]:
    """The first samples of an operation, the same in every run."""
    assert SEED == 42  # to which samples of random operations set the generator of the host; a device ignores that
    torch.manual_seed(SEED)
    for index, sample in enumerate(op.sample_inputs("cpu", dtype_of(op), requires_grad=training)):
        if index == most:
            return
        state = torch.get_rng_state()
        yield index, sample
        torch.set_rng_state(state)


def is_differentiable(op: OpInfo) -> bool:
    return op.supports_autograd and dtype_of(op) is torch.float32


def try_sample(op: OpInfo, index: int, sample: SampleInput, engine: str, part: str) -> Outcome | None:
    """Run one sample both ways; None if eager PyTorch has nothing to compare with."""
    training = part == "backward"

    def outcome(status: str, detail: str = "") -> Outcome:
        return Outcome(op.formatted_name, index, part, status, detail[:600])

    try:
        ours, theirs = (called(op, sample, part) for _ in range(2))
        with time_limit():
            expected = train_eager(theirs) if training else run_eager(theirs)
    except Exception as error:
        return outcome("eager", f"{type(error).__name__}: {error}")
    if expected is None:
        return None
    try:
        with time_limit():
            actual = train(ours, engine) if training else run(ours, engine)
    except poptorch.Error as error:
        return outcome("refused", str(error))
    except Exception as error:
        return outcome("crashed", f"{type(error).__name__}: {error}")
    differs = difference(actual, expected, compares_values=op.name not in UNINITIALISED)
    return outcome("wrong", differs) if differs else outcome("ok")


@dataclass(frozen=True)
class Expected:
    """A sample that the eager engine runs as PyTorch does, and that draws no numbers."""

    op: OpInfo
    index: int
    sample: SampleInput
    result: Any

    def outcome(self, status: str, detail: str = "") -> Outcome:
        return Outcome(self.op.formatted_name, self.index, "forward", status, detail[:600])


def many_in_one(ops: Iterable[OpInfo], most: int | None, engine: str, count: int) -> Iterator[Outcome]:
    """Run the forward part of samples, so many in one program, which saves most of the time to compile them."""
    waiting: list[Expected] = []
    for op in ops:
        for index, sample in samples(op, most, training=False):
            first = try_sample(op, index, sample, "eager", "forward")
            if first is None or first.status != "ok":
                yield from filter(None, [first])
            elif (expected := _without_draws(op, index, sample)) is None:
                yield from filter(None, [try_sample(op, index, sample, engine, "forward")])
            else:
                waiting.append(expected)
        while len(waiting) >= count:
            yield from _in_one_program(waiting[:count], engine)
            waiting = waiting[count:]
    yield from _in_one_program(waiting, engine)


def _without_draws(op: OpInfo, index: int, sample: SampleInput) -> Expected | None:
    """What to expect of a sample, unless that depends on random numbers, which are others in a larger program."""
    result = run_eager(called(op, sample, "forward"))[0]
    other = run(called(op, sample, "forward"), "eager", SEED + 1)[0]
    return None if difference(other, result) else Expected(op, index, sample, result)


def _in_one_program(those: Sequence[Expected], engine: str) -> Iterator[Outcome]:
    """Run samples in one program; if that fails, in two, and so on until it is clear which one is to blame."""
    if not those:
        return
    try:
        calls = [called(each.op, each.sample, "forward") for each in those]
        results = run(Together(calls), engine)[0]
    except Exception as error:
        if len(those) > 1:
            yield from _in_one_program(those[: len(those) // 2], engine)
            yield from _in_one_program(those[len(those) // 2 :], engine)
        else:
            status = "refused" if isinstance(error, poptorch.Error) else "crashed"
            yield those[0].outcome(status, f"{type(error).__name__}: {error}")
        return
    for each, result in zip(those, results, strict=True):
        differs = difference(result, each.result, compares_values=each.op.name not in UNINITIALISED)
        yield each.outcome("wrong" if differs else "ok", differs)


def called(op: OpInfo, sample: SampleInput, part: str) -> Called:
    function = in_place(op) if part == "in place" else op
    args, process = (sample.input, *sample.args), sample.output_process_fn_grad
    return Called(function, args, sample.kwargs, training=part == "backward", process=process)


def in_place(op: OpInfo) -> Callable[..., Any]:
    """The method that changes its tensor, applied to a copy; gives that copy, too."""

    def change(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copied = first.clone()
        assert op.inplace_variant is not None
        return op.inplace_variant(copied, *args, **kwargs), copied

    return change


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"takes more than {SECONDS_PER_SAMPLE} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_PER_SAMPLE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcomes(op: OpInfo, most: int | None, engine: str, parts: Sequence[str]) -> Iterator[Outcome]:
    """Run samples of an operation, as far as it has these parts."""
    has = {"forward": True, "backward": is_differentiable(op), "in place": op.inplace_variant is not None}
    for part in filter(has.__getitem__, parts):
        for index, sample in samples(op, most, training=part == "backward"):
            if part == "in place" and sample.broadcasts_input:
                continue  # the result does not fit into the tensor
            found = try_sample(op, index, sample, engine, part)
            if found is not None:
                yield found


def share(found: Sequence[Outcome], part: str) -> tuple[int, int]:
    """How many of the samples that eager PyTorch runs are right, and how many there are."""
    statuses = Counter(outcome.status for outcome in found if outcome.part == part)
    return statuses["ok"], statuses.total() - statuses["eager"]


def chosen(given: argparse.Namespace) -> Iterator[OpInfo]:
    """The operations that were asked for, as long as there is time."""
    end = time.monotonic() + given.seconds
    for number in range(given.first, len(OPS), given.every):
        if time.monotonic() > end:
            print(f"stopped before operation {number}, {OPS[number].formatted_name}")
            return
        if not given.only or OPS[number].formatted_name in given.only.split(","):
            yield OPS[number]


def all_outcomes(given: argparse.Namespace) -> Iterator[Outcome]:
    if given.together:
        yield from many_in_one(chosen(given), given.most, given.engine, given.together)
        return
    for op in chosen(given):
        yield from outcomes(op, given.most, given.engine, given.parts.split(","))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--most", type=int, help="samples per operation (default: all)")
    parser.add_argument("--every", type=int, default=1, help="only each n-th operation")
    parser.add_argument("--first", type=int, default=0, help="number of the first operation")
    parser.add_argument("--only", help="comma-separated names of operations")
    parser.add_argument("--parts", default="forward,backward,in place")
    parser.add_argument("--together", type=int, help="so many samples in one program, forward only")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time, and say where")
    parser.add_argument("--out", type=Path, help="a file that receives one line of JSON per sample")
    given = parser.parse_args(arguments)
    poptorch.setLogLevel("ERR")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[Outcome] = []
    with given.out.open("a") if given.out else nullcontext() as out:
        for outcome in all_outcomes(given):
            found.append(outcome)
            line = json.dumps(asdict(outcome))
            if out:
                print(line, file=out, flush=True)
            if outcome.status not in ("ok", "eager"):
                print(line, flush=True)
    for part in given.parts.split(","):
        right, possible = share(found, part)
        print(f"{part}: {right} of {possible}")


if __name__ == "__main__":
    main(sys.argv[1:])
