"""Start and end the worker process of an accessor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable
from typing import Any

from poptorch.data.channel import Channel, Kind
from poptorch.data.leftovers import kill_group
from poptorch.data.lifeline import Lifeline
from poptorch.data.shared_file import SharedFile
from poptorch.data.worker import Job, run
from poptorch.enums import SharingStrategy
from poptorch.errors import DataError, explain

_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
# What to try, and how many seconds to wait after it, until the process has ended.
_POLITE_SECONDS, _SIGNALS = 3.0, ((signal.SIGINT, 2.0), (signal.SIGTERM, 1.0))


class Direct:
    """A data set that reaches the worker as an argument."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset

    def __call__(self) -> Iterable[Any]:
        return self._dataset


class InFile:
    """A data set that reaches the worker as a pickle in a nameless temporary file."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._file = SharedFile.on_disk()
        self._place = self._file.append(pickle.dumps(dataset))

    def __call__(self) -> Iterable[Any]:
        return pickle.loads(self._file.read(*self._place))


def send_by(strategy: SharingStrategy) -> Callable[[Iterable[Any]], Callable[[], Iterable[Any]]]:
    """How a data set is wrapped for its way to the worker."""
    return InFile if strategy is SharingStrategy.FileSystem else Direct


class WorkerProcess:
    """The process, from the point of view of the one that started it. `stop` can be called any number of times."""

    def __init__(self, job: Job, strategy: SharingStrategy, channel: Channel, lifeline: Lifeline) -> None:
        self._channel, self._lifeline = channel, lifeline
        context: Any = multiprocessing.get_context(_START_METHODS[strategy])
        if strategy is SharingStrategy.ForkServer:  # import PyTorch once, in the server, and not in each worker
            context.set_forkserver_preload(["__main__", run.__module__])
        self._process = context.Process(target=run, args=(job,), name="poptorch-data-worker")
        self._is_stopped = False
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            for end in (channel, job.channel):
                end.close()
            raise DataError(
                explain(
                    f"the data set cannot be sent to the worker process: {error}",
                    strategy=f"{strategy!s} starts a fresh process and pickles the data set",
                    fix="define its classes and functions at the top level of a module, "
                    "or pass sharing_strategy=poptorch.SharingStrategy.Fork",
                )
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self, *, at_once: bool = False) -> None:
        """End the process: ask, then interrupt, then terminate, then kill; or kill at once."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if not at_once:
            self._ask()
        if at_once or self._process.exitcode != 0:
            self._kill_group()
        self._process.join(_POLITE_SECONDS)
        self._channel.close()
        self._lifeline.cut()

    def _ask(self) -> None:
        self._channel.send(Kind.STOP)
        self._process.join(_POLITE_SECONDS)
        for signal_number, seconds in _SIGNALS:
            if self._process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal_number)
                self._process.join(seconds)

    def _kill_group(self) -> None:
        """Kill the worker and the processes it started, which form a group of their own."""
        kill_group(self.pid)
        self._process.kill()
