"""The worker process of an accessor: it loads elements and puts them into free slots, epoch after epoch.

It obeys the accessor's messages between two elements. Whatever goes wrong is reported with its traceback; the process
then ends.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from poptorch.data.lifeline import Lifeline, end_group
from poptorch.data.line import Kind, Line, Message
from poptorch.data.rebatch import pieces
from poptorch.data.shared_file import SharedFile
from poptorch.data.slots import SlotLayout, Slots
from poptorch.data.torch_workers import LostWorker
from poptorch.errors import DataError
from poptorch.structure import CUSTOM_TYPES

_A_WHILE = 60.0  # a wait is only a loop around this, so its length does not matter
_LONGEST_TRACEBACK = 100_000


@dataclass(frozen=True)
class Job:
    """Everything that the worker is told when it starts."""

    dataset: Callable[[], Iterable[Any]]
    channel: Line
    mailbox: SharedFile
    memory: SharedFile
    lifeline: Lifeline
    slots: int
    held: int  # the slot that counts as being read by the accessor
    rebatched_size: int | None
    keeps_remainder: bool
    load_indefinitely: bool
    early_preload: bool
    spins: bool
    start_method: str  # for processes that the data set starts
    random_state: torch.Tensor
    seed: int
    default_dtype: torch.dtype
    custom_types: tuple[bytes, ...]  # pickles of a type and its parser


class Restart(Exception):
    """The accessor wants the data from the beginning."""


class Stop(Exception):
    """The accessor wants nothing any more."""


def run(job: Job) -> None:
    """What the process does."""
    worker = Worker(job)
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # Ctrl-C is for the main process, which then ends this group
        signal.signal(signal.SIGINT, signal.default_int_handler)
        job.lifeline.attach(end_group)
        multiprocessing.set_start_method(job.start_method, force=True)
        torch.set_num_threads(1)  # a forked process must not use the threads of its parent, which it does not have
        worker.prepare()
        worker.run()
    except (Stop, KeyboardInterrupt):
        pass
    except BaseException as error:
        worker.tell(Kind.FAILED, *job.mailbox.append(_report(error, is_ready=worker.is_ready).encode()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows is the end of PyTorch's own workers


def _report(error: BaseException, *, is_ready: bool) -> str:
    """What the accessor is told; before it can be asked for elements, the traceback also goes to standard error."""
    if isinstance(error, LostWorker):
        return error.what
    text = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    if not is_ready:
        print(text, file=sys.stderr, flush=True)
    return f"the worker process {os.getpid()} raised an exception.\n\n{text}"


class Worker:
    """Moves elements from the data set into slots."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._channel = job.channel
        self._slots: Slots | None = None
        self._inbox: deque[Message] = deque()
        self._free = deque(slot for slot in range(job.slots) if slot != job.held)
        self._generation = 0
        self._requested = 0  # epochs that the accessor asked for in this generation
        self._begun = 0  # epochs that were begun in this generation
        self._has_warned = False  # of types that change

    @property
    def is_ready(self) -> bool:
        """Whether the first element was loaded and the accessor knows what elements look like."""
        return self._slots is not None

    def prepare(self) -> None:
        """Get the data set, and seed the random numbers of this process."""
        torch.set_default_dtype(self._job.default_dtype)
        for pickled in self._job.custom_types:
            CUSTOM_TYPES.register(*pickle.loads(pickled))
        self._dataset = self._job.dataset()
        torch.set_rng_state(self._job.random_state)
        random.seed(self._job.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self._job.seed % 2**32)

    def run(self) -> None:
        """Load epochs until told to stop."""
        while True:
            with contextlib.suppress(Restart):
                if self._begun and not self._job.load_indefinitely:
                    self._attend(until=lambda: self._requested > self._begun)
                self._begun += 1
                self._load_epoch()

    def _load_epoch(self) -> None:
        delivered = 0
        rebatched = self._job.rebatched_size
        for slot, is_full in self._fill_whole() if rebatched is None else self._fill_rebatched(rebatched):
            self._free.remove(slot)
            self.tell(Kind.FILLED if is_full else Kind.FILLED_PARTLY, slot, self._generation)
            delivered += 1
            if self._begun == 1 and not self._job.early_preload:
                self._attend(until=lambda: self._requested > 0)
        if not delivered:
            raise DataError("The Dataset is empty: it gave not a single complete batch.")
        self.tell(Kind.END, number=self._generation)

    def _fill_whole(self) -> Iterator[tuple[int, bool]]:
        """One element per slot."""
        for element in one_pass(self._dataset):
            slots = self._slots or self._allocate(SlotLayout.of(element))
            tensors = self._take_apart(slots, element)
            slot = self._next_slot()
            slots.write(slot, tensors)
            is_full = slots.is_full(tensors)
            if not is_full:
                slots.set_rows(slot, [len(tensor) if tensor.dim() else 1 for tensor in tensors])
            yield slot, is_full

    def _fill_rebatched(self, size: int) -> Iterator[tuple[int, bool]]:
        """As many rows per slot as were asked for."""
        slots, rows = self._slots, 0

        def items() -> Iterator[Sequence[torch.Tensor]]:
            for element in one_pass(self._dataset):
                nonlocal slots
                slots = slots or self._allocate(SlotLayout.of(element, rows=size))
                yield self._take_apart(slots, element)

        for piece in pieces(items(), size):
            assert slots is not None
            slot = self._next_slot()
            slots.write(slot, piece.tensors, piece.row)
            rows = 0 if piece.completes else piece.row + piece.rows
            if piece.completes:
                yield slot, True
        if rows and slots is not None and self._job.keeps_remainder:
            slot = self._next_slot()
            slots.set_rows(slot, [rows] * len(slots.layout.shapes))
            yield slot, False

    def _take_apart(self, slots: Slots, element: Any) -> list[torch.Tensor]:
        tensors, converted = slots.layout.take_apart(element)
        if converted and not self._has_warned:
            self._has_warned = True
            text = (
                f"{'; '.join(converted)}. This and later differences are converted to the types of the first element."
            )
            self.tell(Kind.WARNED, *self._job.mailbox.append(text.encode()))
        return tensors

    def _allocate(self, layout: SlotLayout) -> Slots:
        """Make the slots for elements of this layout, and let the accessor know."""
        self._job.memory.reserve(Slots.nbytes(layout, self._job.slots))
        self._slots = Slots(layout, self._job.slots, self._job.memory)
        self.tell(Kind.READY, *self._job.mailbox.append(pickle.dumps(layout)))
        return self._slots

    def _next_slot(self) -> int:
        """The slot to fill next; waits until there is one."""
        self._attend(until=lambda: bool(self._free))
        return self._free[0]

    def _attend(self, until: Callable[[], bool]) -> None:
        """Read the accessor's messages, at least those that are there now, and wait until the condition holds."""
        while True:
            self._inbox.extend(self._channel.receive())
            while self._inbox:
                message = self._inbox.popleft()  # one by one: whoever begins again must find the rest
                if message.kind == Kind.STOP:
                    raise Stop
                if message.kind == Kind.FREE:
                    self._free.append(message.slot)
                elif message.number == self._generation:
                    self._requested += 1
                else:
                    self._generation, self._requested, self._begun = message.number, 1, 0
                    raise Restart
            if until():
                return
            self._channel.wait(0 if self._job.spins else _A_WHILE)

    def tell(self, kind: Kind, slot: int = 0, number: int = 0) -> None:
        """Send a message; if the accessor has long not read, wait for it."""
        while not self._channel.send(kind, slot, number):
            self._channel.wait(_A_WHILE, to_send=True)


def one_pass(dataset: Any) -> Iterator[Any]:
    """Every element once: by iterating, or by index as far as the length goes, or else an IndexError."""
    if hasattr(dataset, "__iter__") or not isinstance(dataset, Dataset):
        yield from dataset
    elif hasattr(dataset, "__len__"):
        for index in range(len(cast("Sized", dataset))):
            yield dataset[index]
    else:
        with contextlib.suppress(IndexError, StopIteration):
            for index in itertools.count():
                yield dataset[index]
