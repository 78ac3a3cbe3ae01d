"""Programs that use poptorch, without the seconds that importing it takes: one process imports it, then forks for each.

Such a program is a session of its own and otherwise runs like `python -c CODE`: it dies of signals, prints its
traceback, and ends as the interpreter ends. Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import poptorch

TESTS = Path(__file__).parent
LIMIT_SECONDS = 60
MOST_CODE = 100_000


class Programs:
    """Starts programs; `close` ends the process that forks them."""

    def __init__(self):
        self._connection, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}
        command = [sys.executable, __file__, str(far_end.fileno())]
        with far_end:
            self._process = subprocess.Popen(command, env=environment, pass_fds=[far_end.fileno()])

    def start(self, code):
        """A program that is running."""
        program = Program()
        socket.send_fds(self._connection, [code.encode()], program.descriptors)
        program.wait_for(lambda: program.pid, "its start")
        return program

    def run(self, code, seconds=LIMIT_SECONDS):
        """A program that has ended well."""
        program = self.start(code)
        code = program.wait(seconds)  # outside of the assertion, which `python -O` leaves out
        assert code == 0, program.errors
        return program

    def close(self):
        self._connection.close()
        self._process.wait(LIMIT_SECONDS)


class Program:
    """One program: its number, what it has printed so far, and how it ends."""

    def __init__(self):
        # Nameless files to which both sides append: a program that prints a lot never waits for a reader.
        self._files = [tempfile.TemporaryFile("a+b") for _ in ("output", "errors", "life")]  # noqa: SIM115

    def __del__(self):
        for file in self._files:
            file.close()

    @property
    def descriptors(self):
        return [file.fileno() for file in self._files]

    @property
    def output(self):
        return self._read(0)

    @property
    def errors(self):
        return self._read(1)

    @property
    def pid(self):
        return next(iter(self._life), None)

    @property
    def _life(self):
        """The number of the process, and after its end the exit code."""
        return [int(line) for line in self._read(2).splitlines(keepends=True) if line.endswith("\n")]

    def _read(self, which):
        descriptor = self.descriptors[which]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    def wait_for(self, condition, what, seconds=LIMIT_SECONDS):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}: {self.errors}"
            time.sleep(0.01)

    def wait(self, seconds=LIMIT_SECONDS):
        """The exit code; a program that does not end is killed."""
        try:
            self.wait_for(lambda: len(self._life) == 2, "the end of a program", seconds)
        except AssertionError:
            os.killpg(self.pid, signal.SIGKILL)
            raise
        return self._life[1]


def serve(connection):
    """Fork for each request; comes back only as a program, with the code to run."""
    gc.collect()
    gc.freeze()  # what all programs share need not be searched again
    while True:
        code, descriptors, *_ = socket.recv_fds(connection, MOST_CODE, 3)
        if not code:  # the tests have ended
            os._exit(0)
        if os.fork() == 0:
            connection.close()
            begin(*descriptors)
            return code.decode()
        for descriptor in descriptors:
            os.close(descriptor)
        reap()


def begin(output, errors, life):
    """Become the program, watched by a parent that notes how it ends."""
    program = os.fork()
    if program:
        os.write(life, b"%d\n" % program)
        _, status = os.waitpid(program, 0)
        os.write(life, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in (output, errors, life):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background ignores it


def reap():
    """Forget the watchers that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    exec(compile(serve(socket.socket(fileno=int(sys.argv[1]))), "<program>", "exec"), {"poptorch": poptorch})
