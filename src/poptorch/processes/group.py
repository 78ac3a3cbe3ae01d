"""The connection of a process to the others: sums, broadcasts, and agreement on whether something went well.

Every wait ends: with what was waited for, or after `POPTORCH_TIMEOUT` seconds with an error that says which process is
missing, where it runs and which line it was at. What one process raises while all do the same is raised by all.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from torch import distributed

from poptorch import environment
from poptorch._logging import logger
from poptorch.errors import ProcessError, explain
from poptorch.processes.board import Board
from poptorch.processes.place import Place, find_meeting
from poptorch.processes.private import default_store
from poptorch.processes.pulse import Home, Pulse, Sign, watch_seconds
from poptorch.processes.team import Team

_LONGEST = 3600.0  # seconds to wait for a process that lives, but is not through yet with what all do
_LOOK_SECONDS = 0.02
_GROUPS: dict[int, Group] = {}  # the one of this process, by its id: a forked process has none


class Group(Team):
    """All processes of the program, as one of them sees them."""

    def __init__(self, index: int, count: int, store: Any, members: Any, seconds: float, number: int = 0) -> None:
        super().__init__(range(count), index, members, self)
        self.number = number
        self._world = distributed.group.WORLD
        self._board, self._seconds = Board(store, seconds), seconds
        self._teams: dict[int, tuple[Team, Team]] = {}
        self._meetings = 0
        self._told: BaseException | None = None  # the last error that the others know of
        self._board.write(f"home/{index}", json.dumps(asdict(Home.here())))
        self._pulse = Pulse(partial(self._board.write, f"sign/{index}"))
        self._first_home = self._home(0)

    @property
    def is_open(self) -> bool:
        """Whether torch's groups, on which this one is built, are still there."""
        return distributed.is_initialized() and distributed.group.WORLD is self._world

    def teams(self, parts: int) -> tuple[Team, Team]:
        """If each replica is spread over so many processes: those that have a replica together, and those with the
        same part of all replicas. All processes must ask for them.
        """
        if parts not in self._teams:
            replicas = [range(first, first + parts) for first in range(0, self.count, parts)]
            columns = [range(part, self.count, parts) for part in range(parts)]
            self._teams[parts] = self._team(replicas), self._team(columns)
        return self._teams[parts]

    def _team(self, divisions: Sequence[range]) -> Team:
        """The team of this process; torch wants all processes to make all groups."""
        limit, found = timedelta(seconds=self._seconds), None
        for ranks in divisions:
            with self.exchange():
                members = distributed.new_group(list(ranks), timeout=limit, backend="gloo")
            if self.index in ranks:
                found = Team(ranks, ranks.index(self.index), members, self)
        assert found is not None, "every process belongs to a division"
        return found

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Something that all processes take part in; if it fails, raise who is to blame."""
        self._pulse.exchanges += 1
        try:
            yield
        except (RuntimeError, distributed.DistError) as error:
            raise self._failed() from error

    # ---- agreement

    def agree(self, doing: str, facts: str = "", error: BaseException | None = None) -> None:
        """Wait until all processes are through; raises if one of them has failed, or found other facts than the first.

        A process that lives may take long, for example to compile.
        """
        number, self._meetings = self._meetings, self._meetings + 1
        if error is not None:
            self.tell(error)
        failure = "" if error is None else _in_short(error)
        try:
            self._board.write(f"meeting/{number}/{self.index}", json.dumps([failure, facts]))
            if self.index == 0:
                self._board.write(f"verdict/{number}", json.dumps(self._verdict(number, facts)))
            self._await(f"verdict/{number}", 0)
            verdict = json.loads(self._board.read(f"verdict/{number}"))
            self._board.write(f"seen/{number}/{self.index}", "")
        except distributed.DistError as gone:
            raise self._store_is_gone() from gone
        if verdict is not None and error is None:
            raise self._told_by(doing, *verdict)
        if verdict is None:
            self.go_on()

    def _verdict(self, number: int, facts: str) -> tuple[int, str] | None:
        """The first process that something is wrong with, and what."""
        for rank in range(self.count):
            try:
                self._await(f"meeting/{number}/{rank}", rank)
            except ProcessError as error:
                return rank, error.message.splitlines()[0]
            failure, found = json.loads(self._board.read(f"meeting/{number}/{rank}"))
            if failure:
                return rank, failure
            if found != facts:
                return rank, "it has made another program than process 0, or runs it on another engine"
        return None

    def _await(self, key: str, rank: int) -> None:
        """Wait for a key that a process will write, as long as it gives signs of life."""
        begun = seen = time.monotonic()
        last = self._sign(rank)
        while not self._board.has(key):
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - seen > watch_seconds():
                sign = self._sign(rank)
                if (sign.number == last.number and now - seen > self._seconds) or sign.has_ended:
                    raise self._error(rank, _gone(sign), sign)
                if sign.number != last.number:
                    last, seen = sign, now
            if now - begun > _LONGEST:
                raise self._error(rank, f"is not ready after {_LONGEST:g} s", last)

    # ---- failures

    def tell(self, error: BaseException) -> None:
        """Let the others know what this process raises."""
        self._told = error
        with suppress(distributed.DistError):
            self._pulse.fail(error, error.rank if isinstance(error, ProcessError) else None)

    def go_on(self) -> None:
        """All processes have taken part in something again: what was raised before is over."""
        self._pulse.forget()

    def knows(self, error: BaseException) -> bool:
        """Whether the others have been told about an error, or it comes from them."""
        return self._told is error or isinstance(error, ProcessError)

    def raised_by(self, rank: int) -> ProcessError:
        """The error to raise here if a process says that it has failed."""
        sign = self._sign(rank)
        if sign.blames is not None:  # it has only learnt of the failure of another one
            rank, sign = sign.blames, self._sign(sign.blames)
        return self._error(rank, f"has raised {sign.failure or 'an error'}", sign)

    def _told_by(self, doing: str, rank: int, what: str) -> ProcessError:
        return self._error(rank, f"failed while {doing}: {what}", self._sign(rank))

    def _failed(self) -> ProcessError:
        """Who is to blame for an exchange that failed."""
        try:
            found = self._culprit()
        except distributed.DistError:
            found = self._store_is_gone()
        self.tell(found)
        return found

    def _culprit(self) -> ProcessError:
        now, silent = self._watch()
        for rank, sign in now.items():
            if sign.failure and sign.blames is None:
                return self._error(rank, f"has raised {sign.failure}", sign)
        for rank in silent:
            return self._error(rank, _gone(now[rank]), now[rank])
        for rank, sign in now.items():
            if sign.blames == self.index:
                return self._error(rank, "has given up, like all others: this process kept them waiting", sign)
        for sign in now.values():
            if sign.blames is not None:
                said = sign.failure.partition(f" of {self.count} ")[2].rstrip(".")
                return self._error(sign.blames, said or "has failed", self._sign(sign.blames))
        late = min(now, key=lambda rank: now[rank].exchanges)
        return self._error(late, f"did not take part in an exchange within {self._seconds:g} s", now[late])

    def _watch(self) -> tuple[dict[int, Sign], list[int]]:
        """The last signs of the others, and which of them give none any more.

        On a busy machine a process may be silent for a while. So one that has died is looked for twice, and longer if
        there seem to be several, unless somebody has said what happened.
        """
        begun, before, suspects = time.monotonic(), self._signs(), None
        while True:
            if any(sign.failure for sign in before.values()):
                return before, []
            time.sleep(watch_seconds())
            now = self._signs()
            silent = [rank for rank, sign in now.items() if sign.has_ended or sign.number == before[rank].number]
            if any(sign.failure for sign in now.values()):
                return now, []
            if silent == suspects or not silent or time.monotonic() - begun > self._seconds + 2 * watch_seconds():
                return now, silent
            suspects = silent

    def _signs(self) -> dict[int, Sign]:
        return {rank: self._sign(rank) for rank in range(self.count) if rank != self.index}

    def _store_is_gone(self) -> ProcessError:
        text = explain(
            "process 0 of the program, or its launcher, has died or cannot be reached.",
            where=str(self._first_home),
            fix="see what it said last",
        )
        return ProcessError(text, rank=0)

    def _error(self, rank: int, what: str, sign: Sign) -> ProcessError:
        text = explain(
            f"process {rank} of {self.count} {what}.",
            where=str(self._home(rank)),
            line=sign.line,
            state="the model and the optimiser are as they were after the last finished update",
            fix="see what that process said; a checkpoint lets a restarted program go on",
        )
        return ProcessError(text, rank=rank)

    def _sign(self, rank: int) -> Sign:
        return Sign.from_text(self._board.read(f"sign/{rank}"))

    def _home(self, rank: int) -> Home:
        return Home(**json.loads(self._board.read(f"home/{rank}")))

    def close(self) -> None:
        """Leave the others; what ended the program, if something did, is the last that they hear."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not self.knows(error):
            self.tell(error)
        with suppress(distributed.DistError):
            self._pulse.stop()
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """The store may end with process 0: the others, if they live, first read what was agreed on and who failed."""
        end = time.monotonic() + 2 * watch_seconds()
        for rank in range(1, self.count) if self.index == 0 else ():
            while self._still_reads(rank) and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)

    def _still_reads(self, rank: int) -> bool:
        if not self._board.has(f"sign/{rank}"):
            return False
        sign, last = self._sign(rank), self._meetings - 1
        if sign.has_ended:
            return False
        if self._pulse.blames is not None:
            return not sign.failure
        return last >= 0 and not self._board.has(f"seen/{last}/{rank}")


def connect(index: int, count: int) -> Group:
    """Join the other processes, once; they must all do so within some minutes."""
    known = _GROUPS.get(os.getpid())
    if known is not None and not known.is_open:  # somebody has destroyed torch's groups
        atexit.unregister(known.close)
        known.close()
    if known is None or not known.is_open:
        known = _GROUPS[os.getpid()] = _connect(Place(index, count), 0 if known is None else known.number + 1)
        atexit.register(known.close)
    if (known.index, known.count) != (index, count):
        raise ProcessError(
            explain(
                f"this model belongs to process {index} of {count}, but another one to process {known.index} of "
                f"{known.count}.",
                fix="use the same Options.Distributed for all models of a program",
            )
        )
    return known


def _connect(place: Place, number: int) -> Group:
    """The group of this number, counted in every process from its start."""
    seconds = float(environment.TIMEOUT.integer())
    limit = timedelta(seconds=seconds)
    if distributed.is_initialized():
        found = distributed.get_rank(), distributed.get_world_size()
        if found != (place.index, place.count):
            raise ProcessError(
                explain(
                    f"torch.distributed says that this is process {found[0]} of {found[1]}, and the options say "
                    f"process {place.index} of {place.count}.",
                    fix="call Options.Distributed.configureProcessId with what torch.distributed says",
                )
            )
        members = distributed.new_group(backend="gloo", timeout=limit)
        store = _of_this_start(f"poptorch{number}/", default_store())
        return Group(place.index, place.count, store, members, seconds, number)
    meeting = find_meeting(place)
    try:
        url = f"tcp://{meeting.host}:{meeting.port}"
        store, _, _ = next(distributed.rendezvous(url, place.index, place.count, timeout=5 * limit))
        store.set_timeout(limit)
        store = _of_this_start(f"torch{number}/", store)
        distributed.init_process_group("gloo", store=store, rank=place.index, world_size=place.count, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            explain(
                f"process {place.index} of {place.count} did not find the others at {meeting.host}:{meeting.port}.",
                reason=_in_short(error),
                fix="start all processes at about the same time, and see that MASTER_ADDR and MASTER_PORT are the "
                "same for all, free, and reachable",
            )
        ) from error
    logger.info("process %d of %d is connected", place.index, place.count)
    return Group(place.index, place.count, _of_this_start("poptorch", store), None, seconds, number)


def _of_this_start(name: str, store: Any) -> Any:
    """A part of a store that nobody else uses, nor the processes that torchrun has started again."""
    return distributed.PrefixStore(f"{name}{environment.restarts()}", store)


@contextmanager
def together(group: Group | None, doing: str, facts: Callable[[], str] = str) -> Iterator[None]:
    """All processes do what is inside; if one of them fails, or finds other facts, all raise."""
    if group is None:
        yield
        return
    try:
        yield
    except Exception as error:
        if not group.knows(error):
            group.agree(doing, error=error)
        raise
    group.agree(doing, facts())


def _in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _gone(sign: Sign) -> str:
    return "has ended" if sign.has_ended else "has died or cannot be reached"
