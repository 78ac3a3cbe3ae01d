"""PyTorch's loader processes under supervision.

The one place that knows the inside of PyTorch's multi-process iterator. It adds what that iterator lacks: a worker that
does nothing ends in an error instead of a wait without end; an error says which worker and why; workers end with the
process that started them; each epoch draws the same random numbers whether workers persist or not; and small batches
come as they are, without shared memory.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from poptorch.data.leftovers import remove_segments
from poptorch.data.lifeline import Lifeline, end_process
from poptorch.data.packing import PackSmall
from poptorch.data.patience import POLL_SECONDS, Patience, Stopwatch
from poptorch.errors import WorkerError, explain

HOW_TO_WAIT_LONGER = (
    "if it needs that long, pass timeout=<seconds per batch> to the loader, or set POPTORCH_DATA_TIMEOUT"
)
_GRACE_SECONDS = 5.0  # for a worker to finish the batch that it is loading when nobody wants it any more
_UNNOTICED_SECONDS = 4 * POLL_SECONDS  # for which a dead worker may stay unnoticed by a wait that works as it should
FETCHER_FAILED = "An error occurred in the data fetcher"


class LostWorker(WorkerError):
    """One of PyTorch's workers died or stalled; `what` says which, and why."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{FETCHER_FAILED}: {what}")
        self.what = what


class WorkerStart:
    """What a worker does first: hold on to its owner, then run the user's `worker_init_fn`."""

    def __init__(self, lifeline: Lifeline, user_init: Callable[[int], Any] | None) -> None:
        self._lifeline, self._user_init = lifeline, user_init

    def __call__(self, worker_id: int) -> None:
        self._lifeline.attach(end_process)
        if self._user_init is not None:
            self._user_init(worker_id)


class SupervisedIterator(_MultiProcessingDataLoaderIter):
    """PyTorch's iterator with worker processes, with every wait limited.

    A thread watches the clock while the iterator waits for a batch. If patience ends it kills the workers: that is
    what frees the iterator even if it is stuck halfway in receiving a batch.
    """

    def __init__(self, loader: Any, patience: Patience) -> None:
        self._lifeline = Lifeline()
        pids: list[int] = []
        self._watch = Stopwatch(patience, lambda: pids)  # without a reference to self: a cycle would be freed late
        self._is_waiting = False
        self._blamed: str | None = None  # what the supervisor found
        with self._changed_for_workers(loader):
            super().__init__(loader)
        # At exit, before Python terminates them: whoever is terminated while it sends leaves a name in shared memory.
        self._end_workers = Finalize(self, _end_workers, args=(self._workers,), exitpriority=100)
        pids.extend(worker.pid for worker in self._workers if worker.pid is not None)
        self._forget_pids()  # PyTorch's signal handler would raise anywhere in the program; here deaths are looked for
        results: Any = self._worker_result_queue
        if not self._pin_memory:
            results._writer.close()  # so that reading ends when the last worker has ended
        threading.Thread(target=_supervise, args=(weakref.ref(self),), daemon=True, name="poptorch-supervisor").start()

    @contextlib.contextmanager
    def _changed_for_workers(self, loader: Any) -> Iterator[None]:
        """While PyTorch starts the workers, what it hands to them is ours around the user's."""
        user_init, user_collate = loader.worker_init_fn, loader.collate_fn
        loader.worker_init_fn = WorkerStart(self._lifeline, user_init)
        loader.collate_fn = PackSmall(user_collate)
        try:
            yield
        finally:
            loader.worker_init_fn, loader.collate_fn = user_init, user_collate

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can be asked from the same workers."""
        return not self._shutdown

    def _forget_pids(self) -> None:
        if self._worker_pids_set:
            _utils.signal_handling._remove_worker_pids(id(self))
            self._worker_pids_set = False

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # persistent workers keep their seed, but the next epoch must not depend on persistence
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        super()._reset(loader, first_iter)

    def _get_data(self) -> Any:
        self._watch.start()
        self._is_waiting = True
        try:
            data = super()._get_data()
            self._watch.has_started()
            return data
        except (RuntimeError, OSError, EOFError) as error:  # a dead worker, or a connection that it did not serve
            lost = self._find_lost()
            if lost is None:
                raise
            self._kill()
            raise lost from error
        finally:
            self._is_waiting = False

    def _try_get_data(self, timeout: float = POLL_SECONDS) -> tuple[bool, Any]:
        return super()._try_get_data(min(timeout, POLL_SECONDS))

    def check_patience(self) -> None:
        """Called by the supervisor from time to time: kill the workers if the wait has lasted too long."""
        if not self._is_waiting or self._blamed is not None:
            return
        self._blamed = self._why_to_give_up()
        if self._blamed is not None:
            for worker in self._workers:
                worker.kill()

    def _why_to_give_up(self) -> str | None:
        verdict = self._watch.verdict()
        if verdict is not None:
            index = self._task_info.get(self._rcvd_idx, (0,))[0]
            return explain(
                f"{self._name(index)} is stalled: {verdict}.",
                likely="the data set waits for something that does not come: a lock, a connection, a sleep",
                fix=HOW_TO_WAIT_LONGER,
            )
        # PyTorch notices this too, unless it is in the middle of a batch that the worker will not complete.
        wanted = [index for index, is_active in enumerate(self._workers_status) if is_active]
        return self._obituary(wanted) if self._watch.waited > _UNNOTICED_SECONDS else None

    def _find_lost(self) -> LostWorker | None:
        """The worker that is to blame for an error, if one is; a process that is just ending gets a moment."""
        end = time.monotonic() + 4 * POLL_SECONDS
        while time.monotonic() < end:
            why = self._blamed or self._obituary(range(len(self._workers)))
            if why is not None:
                return LostWorker(why)
            time.sleep(0.01)
        return None

    def _obituary(self, indices: Iterable[int]) -> str | None:
        """How one of these workers ended, if one has."""
        ended = [(self._workers[i].exitcode, i) for i in indices if self._workers[i].exitcode is not None]
        for code, index in sorted(ended, key=lambda end: end[0] == 0):  # code 0 may be a worker that had finished
            likely = "lack of memory, a crash in native code, or os._exit in the data set"
            return explain(f"{self._name(index)} {how_it_ended(code)}.", likely=likely)
        return None

    def _name(self, index: int) -> str:
        return f"torch worker {index} of {len(self._workers)} (process {self._workers[index].pid})"

    def _shutdown_workers(self) -> None:
        """Ask all workers to end, and kill those that do not; PyTorch would wait for one after the other."""
        if getattr(self, "_shutdown", True) or _utils.python_exit_status is not False:
            return
        if self._pin_memory:
            super()._shutdown_workers()
            return
        if all(_can_send(queue) for queue in self._index_queues):
            self._workers_done_event.set()
            for queue in self._index_queues:
                queue.put(None)
            end = time.monotonic() + _GRACE_SECONDS
            for worker in self._workers:
                worker.join(max(0.0, end - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        """End the workers without asking: one that is stuck, or that died with a lock, would not let the others go."""
        self._shutdown = True
        self._end_workers()
        for queue in [*self._index_queues, self._worker_result_queue]:
            queue.cancel_join_thread()
            queue.close()


def _end_workers(workers: Sequence[Any]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        wait([worker.sentinel], timeout=_utils.MP_STATUS_CHECK_INTERVAL)
        remove_segments(worker.pid)  # before it disappears from the table of processes, where `kill_group` looks
        worker.join(timeout=_utils.MP_STATUS_CHECK_INTERVAL)


def _can_send(queue: Any) -> bool:
    """Whether a queue still works; if it is garbage together with its iterator, Python has closed it before."""
    return queue._close is None or queue._close.still_active()


def _supervise(reference: weakref.ref[SupervisedIterator]) -> None:
    while True:
        time.sleep(POLL_SECONDS)
        iterator = reference()
        if iterator is None or not iterator.is_usable:
            return
        iterator.check_patience()
        del iterator


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    name = str(-code)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    return f"was killed by {name}"
