"""A program that runs loaders into faults and prints what happened as JSON lines.

It runs in a session of its own: whatever it starts belongs to that session, so that nothing can be overlooked. Workers
note their numbers in a file, by which the names are known that they might leave in shared memory.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import poptorch
from data_sets import Failing
from processes import members, segments

STRATEGIES = {
    "fork": poptorch.SharingStrategy.Fork,
    "forkserver": poptorch.SharingStrategy.ForkServer,
    "spawn": poptorch.SharingStrategy.SharedMemory,
}
SHAPES = [(2, 3), (100, 100)]  # of samples: batches of the first come inside a message, of the second in shared memory
TIMEOUT_SECONDS = 0.3  # of a worker that sleeps; what a good batch takes does not matter, the error is the same


def open_loader(mode, start_method, workers, dataset, **settings):
    mode = poptorch.DataLoaderMode[mode]
    if mode != poptorch.DataLoaderMode.Sync:
        settings["async_options"] = {"sharing_strategy": STRATEGIES[start_method]}
    if workers:
        settings["multiprocessing_context"] = start_method
    return poptorch.DataLoader(poptorch.Options(), dataset, batch_size=2, num_workers=workers, mode=mode, **settings)


def others():
    """The processes of this session, without this one and Python's own helpers."""
    helpers = ("resource_tracker", "multiprocessing.forkserver")
    found = members(session=os.getsid(0))
    return {pid: c for pid, c in found.items() if pid != os.getpid() and not any(name in c for name in helpers)}


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def run_once(mode, start_method, workers, dataset, **settings):
    """Iterate into the fault; how long after it the error came, and what was left behind."""
    loader, error, batches = None, "", 0
    try:
        loader = open_loader(mode, start_method, workers, dataset, **settings)
        for _ in loader:
            batches += 1
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - float(Path(f"{dataset.notes}.time").read_text())
    del loader
    gc.collect()  # the frames in a traceback may refer to each other
    wait_until(lambda: not others(), 5)
    pids = {os.getpid(), *map(int, Path(dataset.notes).read_text().split())}
    return {"batches": batches, "seconds": seconds, "error": error, "left": others(), "segments": segments(pids)}


def run(mode, start_method, workers, repeats, notes, *faults):
    """Every fault so many times."""
    multiprocessing.set_forkserver_preload(["data.fault_driver"])
    for fault in faults:
        settings = {"timeout": TIMEOUT_SECONDS} if fault == "sleep" else {}
        for _, shape in zip(range(repeats), itertools.cycle(SHAPES), strict=False):
            dataset = Failing(fault.partition("-")[0], notes=notes, shape=shape)
            outcome = run_once(mode, start_method, workers, dataset, **settings)
            print(json.dumps({"mode": mode, "fault": fault, **outcome}), flush=True)


def wait_in_the_loop(mode, start_method, workers, notes):
    """Be in the middle of an epoch until somebody ends this process; a worker is stuck meanwhile."""
    loader = open_loader(mode, start_method, workers, Failing("sleep", notes=notes), timeout=1000)
    for _ in loader:
        print("waiting", flush=True)
        time.sleep(1000)
