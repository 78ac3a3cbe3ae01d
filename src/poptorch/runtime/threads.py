"""Run the instructions of several IPUs at the same time, each IPU on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context

import torch

_JOIN_SECONDS = 0.1  # between looks for an interrupt

Work = Callable[[], None]


def run_threads(works: Sequence[Work], give_up: Callable[[], None]) -> None:
    """Do the work of each IPU, all at the same time; raises what was raised first.

    Whatever ends a call early, no thread outlives it: `give_up` must end every wait inside.
    """
    failures: list[BaseException] = []
    per_op = torch.get_num_threads()

    def run(own: Work) -> None:
        torch.set_num_threads(per_op)  # each thread has a number of its own, and sums depend on it
        try:
            own()
        except BaseException as error:
            failures.append(error)
            give_up()

    threads = [
        threading.Thread(target=copy_context().run, args=(run, own), name=f"IPU {ipu}", daemon=True)
        for ipu, own in enumerate(works)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_JOIN_SECONDS)
    except BaseException as interrupt:  # Python hands it to the main thread
        failures.insert(0, interrupt)
        give_up()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
