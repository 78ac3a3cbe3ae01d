"""Start and end the worker process of an accessor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from typing import Any

from poptorch.data.leftovers import kill_group
from poptorch.data.lifeline import Lifeline
from poptorch.data.line import Kind, Line
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


_NAME = "poptorch-data-worker"
_UNGUARDED = 87  # the exit code of a worker that begins to start a worker, because it runs the whole program
_GUARD = (
    'put what the program does under `if __name__ == "__main__":`, so that a fresh process can import it without doing '
    "it again, or pass sharing_strategy=poptorch.SharingStrategy.Fork"
)


class WorkerProcess:
    """The process, from the point of view of the one that started it. `stop` can be called any number of times."""

    def __init__(self, job: Job, strategy: SharingStrategy, channel: Line, lifeline: Lifeline) -> None:
        self._channel, self._lifeline = channel, lifeline
        context: Any = multiprocessing.get_context(_START_METHODS[strategy])
        if strategy is SharingStrategy.ForkServer:  # import PyTorch once, in the server, and not in each worker
            context.set_forkserver_preload(["__main__", run.__module__])
        self._process = context.Process(target=run, args=(job,), name=_NAME)
        self._is_stopped = False
        if strategy is not SharingStrategy.Fork:
            _check_program_is_guarded()
        try:
            self._process.start()
        except Exception as error:
            for end in (channel, job.channel):
                end.close()
            lifeline.cut()
            raise _not_started(error, strategy) from error

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


def _check_program_is_guarded() -> None:
    """Raise if this process is being started itself; Python would not let it start another one then."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    what = explain("a process that is being started cannot start a data worker.", fix=_GUARD)
    if process.name == _NAME:  # whoever waits for this worker learns it from the code
        print(what, file=sys.stderr, flush=True)
        os._exit(_UNGUARDED)
    raise DataError(what)


def _not_started(error: Exception, strategy: SharingStrategy) -> DataError:
    if isinstance(error, (OSError, EOFError)):
        return DataError(f"the worker process could not be started: {type(error).__name__}: {error}")
    return DataError(
        explain(
            f"the data set cannot be sent to the worker process: {type(error).__name__}: {error}",
            strategy=f"{strategy!s} starts a fresh process and pickles the data set",
            fix="define its classes and functions at the top level of a module, "
            "or pass sharing_strategy=poptorch.SharingStrategy.Fork",
        )
    )


def why_it_did_not_start(code: int) -> dict[str, str]:
    """More about a worker that ended with this code before it had anything to say."""
    if code == _UNGUARDED:
        return {"reason": "it imported the program, which at once began to start a worker again", "fix": _GUARD}
    if code == 1:
        return {
            "reason": "an exception before it could report any, which is shown on standard error above",
            "likely": "a fresh process first imports the program, and that fails; " + _GUARD,
        }
    return {}
