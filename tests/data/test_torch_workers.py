"""PyTorch's workers under supervision, in the cases that `test_faults.py` does not reach."""

from __future__ import annotations

import gc
import multiprocessing.queues
import os
import signal
import struct
import time

import pytest
import torch

import poptorch
from data_sets import Inc, IncIter

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class HalfAMessage(Inc):
    """A worker dies when it has announced more bytes than it sends."""

    def __getitem__(self, index):
        if index == 4:
            queues = [thing for thing in gc.get_objects() if type(thing) is multiprocessing.queues.Queue]
            (results,) = [queue for queue in queues if queue._thread is not None]
            time.sleep(0.2)  # for the batches before
            os.write(results._writer.fileno(), struct.pack("!i", 1000) + b"some of it")
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 5:
            time.sleep(1000)
        return super().__getitem__(index)


def test_a_worker_that_dies_in_the_middle_of_a_batch():
    loader = poptorch.DataLoader(poptorch.Options(), HalfAMessage(20), num_workers=2)
    with pytest.raises(poptorch.Error, match=r"torch worker 0 of 2 .* was killed by SIGKILL"):
        list(loader)


class FirstIsShort(IncIter):
    """One worker has nothing, the other needs longer than a dead worker would be waited for."""

    def __iter__(self):
        if torch.utils.data.get_worker_info().id == 1:
            time.sleep(1.5)
            yield from super().__iter__()


def test_a_worker_that_has_finished_is_not_missed():
    loader = poptorch.DataLoader(
        poptorch.Options(), FirstIsShort(3), num_workers=2, persistent_workers=False, worker_init_fn=lambda _: None
    )
    assert [int(batch[0, 0, 0]) for batch in loader] == [0, 1, 2]
