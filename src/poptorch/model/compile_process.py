"""The process that compiles for another one: it reads a request from a folder, and leaves its answer there.

It ends with the process that it works for, however that one ends, and takes its compilers along.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from poptorch.engines import NativeEngine, surroundings
from poptorch.engines.compilers import stop_all
from poptorch.errors import Error, FileError
from poptorch.ops.registration import know_our_ops
from poptorch.store import (
    Cache,
    Container,
    code_parts,
    compile_cached,
    read_container,
    read_executable,
    write_container,
)
from poptorch.store.container import json_part
from poptorch.store.files import programs_digest

REQUEST, ANSWER, ERRORS = "request.poptorch", "answer.poptorch", "errors.txt"
_ORDER, _OUTCOME = "order.json", "outcome.json"
# Python puts the current folder first, where a file of the user's could stand before a module of the same name.
START = "import sys; sys.path[0] or sys.path.pop(0); from poptorch.model.compile_process import main; main()"
_GLANCE_SECONDS = 0.2


@dataclass(frozen=True)
class Order:
    """What is to be compiled, for whom, and under which switches of PyTorch."""

    owner: int  # the process that waits
    programs: list[str]
    cache: str | None
    surroundings: dict[str, str]
    threads: int
    default_type: str
    uses_onednn: bool

    @classmethod
    def of_this_process(cls, programs: list[str], cache: Path | None, here: Mapping[str, str]) -> Order:
        return cls(
            os.getpid(),
            programs,
            None if cache is None else str(cache),
            dict(here),
            torch.get_num_threads(),
            str(torch.get_default_dtype()).removeprefix("torch."),
            torch._C._get_mkldnn_enabled(),  # pyright: ignore
        )

    def parts(self) -> dict[str, bytes]:
        return {_ORDER: json_part(asdict(self))}

    def apply(self) -> None:
        """Set the switches as they are in the other process."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(getattr(torch, self.default_type))
        torch.set_float32_matmul_precision(self.surroundings["precision"])
        torch.use_deterministic_algorithms(self.surroundings["deterministic"] == "True")
        torch._C._set_mkldnn_enabled(self.uses_onednn)  # pyright: ignore


@dataclass(frozen=True)
class Outcome:
    """How it went; both texts are empty if the code comes along."""

    failure: str = ""  # why there is no code
    stays: str = ""  # why it cannot leave the process that makes it

    def parts(self) -> dict[str, bytes]:
        return {_OUTCOME: json_part(asdict(self))}

    @classmethod
    def read(cls, container: Container) -> Outcome:
        return cls(**container.json(_OUTCOME))


def main() -> None:
    """Do what the request in the folder of the command line asks for."""
    folder = Path(sys.argv[1])
    request = read_container(folder / REQUEST)
    order = Order(**request.json(_ORDER))
    threading.Thread(target=_end_with, args=(order.owner, folder), daemon=True).start()
    parts = answer(request, order)
    write_container(folder / ANSWER, {"kind": "answer"}, parts)


def answer(request: Container, order: Order) -> dict[str, bytes]:
    """Compile, and say how it went."""
    order.apply()
    know_our_ops()
    try:
        executable = read_executable(request)
    except FileError as error:
        return Outcome(stays=error.message).parts()
    here = surroundings()
    differing = [name for name, value in order.surroundings.items() if here.get(name) != value]
    if differing:
        return Outcome(stays=f"another process has another {', '.join(differing)}").parts()
    programs = [program for program in executable.programs if program.name in order.programs]
    cache = None if order.cache is None else Cache(Path(order.cache))
    try:
        kernels = compile_cached(cache, NativeEngine(), executable, programs, lambda name, graph: None)
    except Error as error:
        return Outcome(failure=error.message).parts()
    except Exception as error:
        return Outcome(failure=f"{type(error).__name__}: {error}").parts()
    code = code_parts(programs_digest(executable), kernels)
    if not code:
        return Outcome(stays="it calls Python on its way, or there is no private place for a key").parts()
    return {**Outcome().parts(), **code}


def _end_with(owner: int, folder: Path) -> Any:
    """Wait until the process that this one works for is gone; then end everything that was started here."""
    while os.getppid() == owner:
        time.sleep(_GLANCE_SECONDS)
    stop_all()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
