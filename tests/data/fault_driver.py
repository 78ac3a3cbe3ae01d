"""Runs one loader with one kind of start method into every fault, and prints what happened as JSON lines.

It is run as a process of its own, in a session of its own: whatever it starts belongs to that session, so that nothing
can be overlooked. Usage: fault_driver.py MODE START_METHOD WORKERS REPEATS FAULT...
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time

import poptorch
from data_sets import Failing
from processes import members

STRATEGIES = {"fork": poptorch.SharingStrategy.Fork, "spawn": poptorch.SharingStrategy.SharedMemory}


def open_loader(mode, start_method, workers, fault, **settings):
    if mode != poptorch.DataLoaderMode.Sync:
        settings["async_options"] = {"sharing_strategy": STRATEGIES[start_method]}
    if workers:
        settings["multiprocessing_context"] = start_method
    return poptorch.DataLoader(
        poptorch.Options(), Failing(fault), batch_size=2, num_workers=workers, mode=mode, **settings
    )


def others():
    """The processes of this session, without this one and Python's own helpers."""
    helpers = ("resource_tracker", "forkserver")
    found = members(session=os.getsid(0))
    return {pid: c for pid, c in found.items() if pid != os.getpid() and not any(name in c for name in helpers)}


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def run_once(mode, start_method, workers, fault, **settings):
    """Iterate into the fault; how long after the last good batch the error came, and what was left behind."""
    loader, error, batches = None, "", 0
    last = time.monotonic()
    try:
        loader = open_loader(mode, start_method, workers, fault, **settings)
        for _ in loader:
            batches, last = batches + 1, time.monotonic()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - last
    del loader
    gc.collect()  # the frames in a traceback may refer to each other
    wait_until(lambda: not others(), 5)
    return {"fault": fault, "batches": batches, "seconds": seconds, "error": error, "left": others()}


def wait_in_the_loop(mode, start_method, workers):
    """Be in the middle of an epoch until somebody ends this process; a worker is stuck meanwhile."""
    loader = open_loader(mode, start_method, workers, "sleep", timeout=1000)
    for _ in loader:
        print("waiting", flush=True)
        time.sleep(1000)


def main():
    mode, start_method, workers, repeats, *faults = sys.argv[1:]
    mode, workers = poptorch.DataLoaderMode[mode], int(workers)
    for fault in faults:
        if fault == "wait":
            wait_in_the_loop(mode, start_method, workers)
        settings = {"timeout": 1.0} if fault == "sleep" else {}
        for _ in range(int(repeats)):
            outcome = run_once(mode, start_method, workers, fault.partition("-")[0], **settings)
            print(json.dumps({**outcome, "fault": fault}), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background ignores it
    main()
