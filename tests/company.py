"""Several processes of one program, started once and given one case after the other."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LIMIT = 90.0  # seconds for one case
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "poptorch",
    "poptorch.capture.record",
    "process_cases",
    "pipeline_cases",
]  # once for all


@dataclass(frozen=True)
class Raised:
    """What a process raised instead of giving a result."""

    kind: str
    text: str
    trace: str = field(repr=False, default="")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def place(rank, count, port):
    """The variables by which torchrun tells a process where it is."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def _serve(connection, environment):
    """Run cases until the other end is closed."""
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(result))


class Company:
    """So many processes; each can be given functions of modules in `tests`, by which they are found again."""

    def __init__(self, count, **environment):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        port, self._pipes, self.members = free_port(), [], []
        for rank in range(count):
            here, there = context.Pipe()
            own = {**place(rank, count, port), **environment}
            member = context.Process(target=_serve, args=(there, own), daemon=True)
            member.start()
            there.close()
            self._pipes.append(here)
            self.members.append(member)

    def start(self, function, *args, **kwargs):
        """Let every process begin with a case."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has been killed
                pipe.send_bytes(pickle.dumps((function, args, kwargs)))

    def results(self, seconds=LIMIT) -> list[Any]:
        """What each process gives or raises; None for one that has died."""
        end = time.monotonic() + seconds
        return [self._result(rank, end) for rank in range(len(self._pipes))]

    def _result(self, rank, end) -> Any:
        assert self._pipes[rank].poll(max(0.0, end - time.monotonic())), f"process {rank} hangs"
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            return None

    def run(self, function, *args, **kwargs):
        """The results of a case, which all processes must have."""
        self.start(function, *args, **kwargs)
        found = self.results()
        wrong = [result for result in found if isinstance(result, Raised)]
        assert not wrong, wrong[0].trace
        return found

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for member in self.members:
            member.join(10)
            if member.is_alive():
                member.kill()
