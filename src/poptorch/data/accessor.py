"""`AsynchronousDataAccessor`: batches that another process has prepared while the model was running.

One worker process fills slots in shared memory; the accessor hands them out in place. It holds one slot, the batch that
it gave out last, and gives it back when it hands out the next one; so a batch is valid until then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections import deque
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.utils.data
from typing_extensions import Self

from poptorch import profiling
from poptorch._logging import logger
from poptorch.data.checks import flag, member, number, seconds, whole_number
from poptorch.data.lifeline import Lifeline
from poptorch.data.line import Kind, Line, Message
from poptorch.data.patience import POLL_SECONDS, Patience, Stopwatch
from poptorch.data.process import WorkerProcess, why_it_did_not_start
from poptorch.data.sending import send_by
from poptorch.data.shared_file import SharedFile
from poptorch.data.slots import SlotLayout, Slots
from poptorch.data.torch_workers import FETCHER_FAILED, HOW_TO_WAIT_LONGER, how_it_ended
from poptorch.data.worker import Job
from poptorch.enums import SharingStrategy
from poptorch.errors import DataError, Error, WorkerError, explain
from poptorch.structure import CUSTOM_TYPES, ICustomArgParser

_MOST_BUFFERS = 65536
_TRACE = profiling.Channel("poptorch.DataLoader")  # PyTorch marks the other mode by itself


class AsynchronousDataAccessor:
    """Iterates over a data set or a loader in a process of its own.

    The tensors it gives are shared memory that is used again: they are valid until the next element is asked for.
    Clone what you want to keep.

    Programs that use another sharing strategy than `Fork` need the usual `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
        timeout: float = 0,
    ) -> None:
        """Start the worker and wait for its first element.

        Args:
            dataset: a loader, or a data set of either style.
            buffer_size: how many batches are loaded ahead.
            miss_sleep_time_in_ms: the worker sleeps until a slot is free; 0 or less lets it look all the time instead,
                which saves microseconds and costs a core.
            load_indefinitely: load the next epoch as soon as one ends, rather than when it is asked for.
            early_preload: fill all buffers at once; otherwise only the first until iteration begins.
            sharing_strategy: how the worker is started.
            rebatched_size: put the rows of consecutive elements together to batches of this size.
            timeout: seconds to wait for one batch. With 0 the accessor waits for as long as the worker is busy (for
                at most an hour), and gives up after 7 seconds in which it does nothing.
        """
        what = "it is a number of batches to load ahead"
        buffer_size = whole_number("buffer_size", buffer_size, least=1, most=_MOST_BUFFERS, what=what)
        spins = number("miss_sleep_time_in_ms", miss_sleep_time_in_ms) <= 0
        load_indefinitely = flag("load_indefinitely", load_indefinitely)
        early_preload = flag("early_preload", early_preload)
        strategy = member("sharing_strategy", sharing_strategy, SharingStrategy)
        patience = _patience_for(dataset, timeout)
        _check_dataset(dataset, rebatched_size)
        self._dataset, self._rebatched_size = dataset, rebatched_size
        self._load_indefinitely = load_indefinitely
        self._generation = 0
        self._is_consumed = False  # whether this epoch gave out an element
        self._is_requested = False  # whether anybody has asked for an epoch
        self._is_ended = False
        self._held = buffer_size  # the last of the slots counts as given out, until one really is
        self._messages: deque[Message] = deque()
        self._failure: str | None = None
        self._mailbox, self._memory = SharedFile.in_memory(), SharedFile.in_memory()
        self._channel, far_end = Line.pair()
        lifeline = Lifeline()
        job = Job(
            dataset=send_by(strategy)(dataset),
            channel=far_end,
            mailbox=self._mailbox,
            memory=self._memory,
            lifeline=lifeline,
            slots=buffer_size + 1,
            held=self._held,
            rebatched_size=rebatched_size,
            keeps_remainder=not getattr(dataset, "_drops_remainder", getattr(dataset, "drop_last", True)),
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
            spins=spins,
            start_method=multiprocessing.get_start_method(),
            random_state=torch.get_rng_state(),
            default_dtype=torch.get_default_dtype(),
            seed=int(torch.empty((), dtype=torch.int64).random_()),
            custom_types=_sendable(CUSTOM_TYPES.registered()),
        )
        worker = self._worker = WorkerProcess(job, strategy, self._channel, lifeline)
        far_end.close()
        Finalize(self, worker.stop, exitpriority=100)  # at exit, before Python waits for processes without a limit
        self._watch = Stopwatch(patience, lambda: [worker.pid])
        logger.debug("AsynchronousDataAccessor worker process: %s", worker.pid)
        self._slots: Slots | None = None
        self._slots = self._await_layout(buffer_size + 1)

    # ---- iterating

    def __iter__(self) -> Self:
        """Begin an epoch; if the last one was left early, the data starts again from the beginning."""
        self._check_usable()
        if self._is_consumed and not self._is_ended:
            self._generation += 1
            self._request()
        elif self._is_ended or not self._is_requested:
            self._request()
        return self

    def _request(self) -> None:
        self._is_consumed, self._is_ended, self._is_requested = False, False, True
        self._send(Kind.START, number=self._generation)

    def __next__(self) -> Any:
        """The next element; what the last one gave is no longer valid."""
        with _TRACE.tracepoint("next"):
            return self._next()

    def _next(self) -> Any:
        self._check_usable()
        if not self._is_requested:
            self._request()
        if self._is_ended:
            raise StopIteration
        message = self._next_message()
        if message.kind == Kind.END:
            self._is_ended = True
            raise StopIteration
        assert self._slots is not None
        self._send(Kind.FREE, self._held)
        self._held = message.slot
        self._is_consumed = True
        if message.kind == Kind.FILLED:
            return self._slots.batch(message.slot)
        return self._slots.partial_batch(message.slot)

    def __len__(self) -> int:
        """The number of elements in an epoch."""
        length = len(self._dataset)  # pyright: ignore[reportArgumentType]
        if self._rebatched_size is None or getattr(self._dataset, "_accessor", None) is self:
            return length
        return length * (getattr(self._dataset, "batch_size", None) or 1) // self._rebatched_size

    def _next_message(self) -> Message:
        """What the worker says next about the current generation; slots of an older one are given back."""
        while True:
            while not self._messages:
                self._receive()
            message = self._messages.popleft()
            if message.kind == Kind.FAILED:
                raise self._raised(message)
            if message.kind == Kind.WARNED:
                logger.warning("%s", self._mail(message).decode())
                continue
            if message.number == self._generation:
                return message
            if message.kind != Kind.END:
                self._send(Kind.FREE, message.slot)

    # ---- waiting

    def _receive(self) -> None:
        """Wait for messages from the worker; raises if there will be none."""
        self._watch.start()
        while not self._messages:
            self._channel.wait(POLL_SECONDS)
            self._check_worker()

    def _check_worker(self) -> None:
        """Collect what the worker has sent; if that is nothing, make sure that it is alive and working."""
        code = self._worker.exit_code  # before reading: whatever it sent was sent before it ended
        self._messages.extend(self._channel.receive())
        if self._messages:
            return
        if code is not None:
            details = why_it_did_not_start(code) if self._slots is None else {}
            raise self._failed(f"{self._name} {how_it_ended(code)}.", **details)
        self._check_progress()

    def _check_progress(self) -> None:
        verdict = self._watch.verdict()
        if verdict is not None:
            raise self._failed(f"{self._name} is stalled: {verdict}.", fix=HOW_TO_WAIT_LONGER)

    def _send(self, kind: Kind, slot: int = 0, number: int = 0) -> None:
        if self._channel.send(kind, slot, number):
            return
        self._watch.start()
        while not self._channel.send(kind, slot, number):
            self._channel.wait(POLL_SECONDS, to_send=True)
            if self._worker.exit_code is not None:
                return  # the next wait says why
            self._check_progress()

    def _await_layout(self, slots: int) -> Slots:
        while not self._messages:
            self._receive()
        message = self._messages.popleft()
        if message.kind == Kind.FAILED:
            raise self._raised(message)
        self._watch.has_started()
        layout: SlotLayout = pickle.loads(self._mail(message))
        return Slots(layout, slots, self._memory)

    def _mail(self, message: Message) -> bytes:
        return self._mailbox.read(message.slot, message.number)

    # ---- ending

    @property
    def _name(self) -> str:
        return f"the worker process {self._worker.pid}"

    def _raised(self, message: Message) -> WorkerError:
        return self._failed(self._mail(message).decode())

    def _failed(self, what: str, **details: str) -> WorkerError:
        """Remember why no more elements will come, and get rid of the worker."""
        headline = "The data worker thread failed to start" if self._slots is None else FETCHER_FAILED
        self._failure = explain(f"{headline}: {what}", **details)
        self._worker.stop(at_once=True)
        return WorkerError(self._failure)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise WorkerError(self._failure)
        if self._worker.is_stopped:
            raise DataError("the worker of this loader was terminated, so it cannot be iterated any more.")

    def terminate(self) -> None:
        """Stop the worker; the accessor cannot be used any more. Happens by itself when it is deleted, and at exit."""
        self._worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.terminate()


def _check_dataset(dataset: Any, rebatched_size: int | None) -> None:
    if getattr(dataset, "_accessor", None) is not None:
        raise Error("this DataLoader is asynchronous already: wrap one with DataLoaderMode.Sync, or iterate it itself.")
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise DataError(f"elements come by iteration or by index, but {dataset!r} has neither.")
    if rebatched_size is not None:
        if isinstance(rebatched_size, bool) or not isinstance(rebatched_size, int) or rebatched_size < 2:
            raise DataError(f"rebatched_size is None or a number of rows greater than 1, not {rebatched_size!r}.")
    elif getattr(dataset, "_may_end_with_remainder", False):
        raise DataError(
            explain(
                "this DataLoader has drop_last=False, so its last batch may be smaller than the others.",
                fix="pass rebatched_size=loader.combinedBatchSize, or use DataLoaderMode.AsyncRebatched",
            )
        )


def _patience_for(dataset: Any, timeout: float) -> Patience:
    own, timeout = getattr(dataset, "_patience", None), seconds("timeout", timeout)
    if timeout or not isinstance(own, Patience):
        return Patience.of(timeout or getattr(dataset, "timeout", 0))
    # A loader with torch workers watches them itself and knows more about them, so it may speak first.
    return own.longer(1.0) if getattr(dataset, "num_workers", 0) else own


def _sendable(parsers: dict[type, ICustomArgParser]) -> tuple[bytes, ...]:
    """Those that another process can have; a type that is local to a function can only be inherited by a fork."""
    sendable: list[bytes] = []
    for kind, parser in parsers.items():
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            sendable.append(pickle.dumps((kind, parser)))
    return tuple(sendable)
