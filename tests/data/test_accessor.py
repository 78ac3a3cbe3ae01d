"""`poptorch.AsynchronousDataAccessor`; numbers in comments are those of the statements in the specification."""

from __future__ import annotations

import collections
import os
import re
import signal
import time

import pytest
import torch

import poptorch
from data_sets import Counting, Dicts, Failing, Inc, IncIter, Pairs, Slow
from poptorch import AsynchronousDataAccessor, DataLoaderMode, SharingStrategy
from poptorch.data.patience import Patience
from processes import members

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def accessor_of(dataset, **arguments):
    return AsynchronousDataAccessor(dataset, **{"sharing_strategy": SharingStrategy.Fork, **arguments})


def loader_of(dataset, mode=DataLoaderMode.Async, **arguments):
    if mode is not DataLoaderMode.Sync:
        arguments["async_options"] = {"sharing_strategy": SharingStrategy.Fork, **arguments.get("async_options", {})}
    return poptorch.DataLoader(poptorch.Options(), dataset, mode=mode, **arguments)


def first_values(iterable):
    return [int(element.flatten()[0]) for element in iterable]


# ---- iterating


def test_a_sync_loader_wrapped_by_hand():  # 27
    loader = loader_of(Inc(101), DataLoaderMode.Sync, batch_size=4)
    accessor = accessor_of(loader)
    assert len(accessor) == 25
    assert first_values(accessor) == list(range(0, 100, 4))


def test_over_raw_data_sets():  # 28, 35
    accessor = accessor_of(Inc(101))
    assert len(accessor) == 101
    assert first_values(accessor) == list(range(101))
    accessor = accessor_of(IncIter(100))
    assert [first_values(accessor) for _ in range(2)] == [list(range(100))] * 2


def test_indexed_data_without_a_length():
    class Endless(torch.utils.data.Dataset):
        def __getitem__(self, index):
            if index == 4:
                raise IndexError
            return torch.tensor([index])

    assert first_values(accessor_of(Endless())) == [0, 1, 2, 3]


def test_many_torch_workers():  # 37
    assert first_values(loader_of(Inc(100), num_workers=32)) == list(range(100))


@pytest.mark.parametrize("persistent", [True, False])
def test_after_an_interruption_data_starts_again(persistent):  # 38, 41
    loader = loader_of(Inc(10), num_workers=1, persistent_workers=persistent)
    for count, element in enumerate(loader):
        if count == 4:
            assert int(element.flatten()[0]) == 4
            break
    assert [first_values(loader) for _ in range(4)] == [list(range(10))] * 4


@pytest.mark.parametrize("buffer_size", [1, 2, 5])
@pytest.mark.parametrize("load_indefinitely", [True, False])
def test_epochs_left_at_any_point(buffer_size, load_indefinitely):
    accessor = accessor_of(Inc(6), buffer_size=buffer_size, load_indefinitely=load_indefinitely)
    for stop in [0, 1, 3, 6, 2, 0, 5, 6, 6]:
        iterator = iter(accessor)
        assert [int(next(iterator)[0, 0]) for _ in range(stop)] == list(range(stop))
    assert first_values(accessor) == list(range(6))


def test_the_end_of_an_epoch_stays_the_end():
    accessor = accessor_of(Inc(3))
    assert first_values(accessor) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(accessor)


def loaded(path, expected):
    """The number of loaded elements, once it does not grow any more."""
    end = time.monotonic() + 10
    while time.monotonic() < end and path.stat().st_size < expected:
        time.sleep(0.01)
    time.sleep(0.1)
    return path.stat().st_size


@pytest.mark.parametrize(("early_preload", "ready"), [(True, 5), (False, 1)])
def test_preloading(tmp_path, early_preload, ready):  # 39
    path = tmp_path / "loaded"
    accessor = accessor_of(Counting(20, path), buffer_size=5, early_preload=early_preload)
    in_hand = early_preload  # the worker holds one more element, for which there is no free slot
    assert loaded(path, ready + in_hand) == ready + in_hand
    assert first_values(accessor) == list(range(20))


def test_the_next_epoch_is_loaded_only_if_wanted(tmp_path):
    for load_indefinitely, more in [(True, 4), (False, 0)]:
        path = tmp_path / str(load_indefinitely)
        accessor = accessor_of(Counting(5, path), load_indefinitely=load_indefinitely)
        assert first_values(accessor) == list(range(5))
        assert loaded(path, 5 + more) == 5 + more


def test_rebatching_by_hand():
    loader = torch.utils.data.DataLoader(Inc(20), batch_size=3)
    accessor = accessor_of(loader, rebatched_size=8)
    assert [batch[:, 0, 0].tolist() for batch in accessor] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert len(accessor) == 7 * 3 // 8


def test_a_profile_shows_the_wait_for_data():
    accessor = accessor_of(Inc(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        first_values(accessor)
    assert [event.name for event in recorded.events()].count("poptorch.DataLoader.next") == 4  # with the end


# ---- elements


def test_tuples_come_back_as_lists():  # 49
    first = next(iter(accessor_of(Pairs(3))))
    assert isinstance(first, list)
    assert [tensor.shape for tensor in first] == [(2, 3), (1,)]


Point = collections.namedtuple("Point", "x y")


class Nested(Inc):
    def __getitem__(self, index):
        x = super().__getitem__(index)
        return {"pair": (x, [x + 1]), "point": Point(x + 2, x + 3)}


def test_nested_elements():
    for index, element in enumerate(accessor_of(Nested(4))):
        assert type(element["pair"]) is list
        assert type(element["point"]) is Point
        values = [element["pair"][0], element["pair"][1][0], *element["point"]]
        assert [int(value[0, 0]) for value in values] == [index, index + 1, index + 2, index + 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64])
def test_types(dtype):
    found = [element.clone() for element in accessor_of(Inc(3, shape=(), dtype=dtype))]
    assert [element.dtype for element in found] == [dtype] * 3
    assert [bool(element) for element in found] == [False, True, True]


class Odd(Inc):
    """Element 2 is not like the others."""

    def __init__(self, odd):
        super().__init__(4)
        self.odd = odd

    def __getitem__(self, index):
        return self.odd if index == 2 else super().__getitem__(index)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (torch.zeros(3, 3), r"shape \[3, 3\].*buffers for shape \[2, 3\]"),
        (torch.zeros(2, 4), r"shape \[2, 4\].*buffers for shape \[2, 3\]"),
        (torch.zeros(2, 3, dtype=torch.complex64) + 1j, "element is of type torch.complex64.*cannot hold its values"),
        ([torch.zeros(2, 3)], "structure {'list': .*the data set had tensor"),
        (7, r"contains 7 \(int\), but only tensors"),
    ],
)
def test_elements_must_be_alike(odd, text):
    accessor = accessor_of(Odd(odd))
    with pytest.raises(AssertionError, match=f"(?s)An error occurred in the data fetcher.*{text}"):
        first_values(accessor)
    with pytest.raises(AssertionError, match="An error occurred in the data fetcher"):  # and again
        next(accessor)


class Changing(torch.utils.data.Dataset):
    """From the third element on they have another type."""

    def __init__(self, first, later):
        self.first, self.later = first, later

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"same": torch.zeros(1), "other": self.first if index < 2 else self.later}


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (torch.tensor([1.0]), torch.tensor([2]), torch.tensor([2.0])),
        (torch.tensor([1.0]), torch.tensor([0.1], dtype=torch.float64), torch.tensor([0.1])),
        (torch.tensor([1]), torch.tensor([3.0]), torch.tensor([3])),
        (torch.tensor([1]), torch.tensor([True]), torch.tensor([1])),
        (torch.tensor([1], dtype=torch.int8), torch.tensor([-3]), torch.tensor([-3], dtype=torch.int8)),
        (torch.tensor([1.0]), torch.tensor([2 + 0j]), torch.tensor([2.0])),
        (torch.tensor([1.0]).half(), torch.tensor([float("nan")]), torch.tensor([float("nan")]).half()),
    ],
)
def test_types_become_those_of_the_first_element_with_one_warning(first, later, expected, caplog):
    found = [element["other"].clone() for element in accessor_of(Changing(first, later))]
    for element, value in zip(found, [first] * 2 + [expected] * 4, strict=True):
        torch.testing.assert_close(element, value, rtol=0, atol=0, equal_nan=True)
    text = f"element.*other.* is of type {later.dtype}, but in the first element it was {first.dtype}"
    assert len(caplog.records) == 1
    assert re.search(text, caplog.text)


def test_types_are_converted_when_rows_are_put_together(caplog):
    loader = torch.utils.data.DataLoader(Changing(torch.tensor([1.0]), torch.tensor([2])), batch_size=2)
    found = [batch["other"].flatten().tolist() for batch in accessor_of(loader, rebatched_size=3)]
    assert found == [[1, 1, 2], [2, 2, 2]]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (torch.tensor([1]), torch.tensor([0.5])),
        (torch.tensor([1]), torch.tensor([float("nan")])),
        (torch.tensor([1], dtype=torch.int8), torch.tensor([300])),
        (torch.tensor([True]), torch.tensor([2])),
        (torch.tensor([1.0]), torch.tensor([2 + 1j])),
    ],
)
def test_values_that_the_first_type_cannot_hold_are_refused(first, later):
    with pytest.raises(AssertionError, match=f"(?s)is of type {later.dtype}.*{first.dtype}, which cannot hold"):
        list(accessor_of(Changing(first, later)))


def test_only_the_number_of_rows_may_be_smaller():
    found = [tuple(element.shape) for element in accessor_of(Odd(torch.ones(1, 3)))]
    assert found == [(2, 3), (2, 3), (1, 3), (2, 3)]


def test_keys_may_change_their_order():
    class Turned(Dicts):
        def __getitem__(self, index):
            element = super().__getitem__(index)
            return dict(reversed(element.items())) if index % 2 else element

    assert [(list(e), int(e["label"])) for e in accessor_of(Turned(4))] == [(["data", "label"], i) for i in range(4)]


# ---- lifetime


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_tensors_live_until_the_next_element(buffer_size):  # 48
    kept, clones = [], []
    for element in accessor_of(Inc(20), buffer_size=buffer_size, load_indefinitely=False):
        time.sleep(0.005)  # the worker has filled whatever it may fill
        assert int(element[0, 0]) == len(kept)
        kept.append(element)
        clones.append(element.clone())
    assert first_values(clones) == list(range(20))
    assert int(kept[-1][0, 0]) == 19  # also after the end of the loop
    assert all(int(kept[i][0, 0]) != i for i in range(20 - buffer_size - 1))
    assert len({element.data_ptr() for element in kept}) <= buffer_size + 1


def test_tensors_outlive_the_accessor():
    accessor = accessor_of(Inc(3))
    first = next(iter(accessor))
    accessor.terminate()
    del accessor
    assert first.sum() == 0


# ---- arguments


def test_an_asynchronous_loader_is_not_wrapped_again():  # 44
    with pytest.raises(poptorch.Error, match="asynchronous already"):
        accessor_of(loader_of(Inc()))


@pytest.mark.parametrize("size", [1, 0, 2.5])
def test_rebatched_size_is_a_number_of_rows(size):  # 45
    with pytest.raises(AssertionError, match="greater than 1"):
        accessor_of(Inc(), rebatched_size=size)


def test_a_remainder_needs_rebatching():  # 46
    loader = loader_of(Inc(101), DataLoaderMode.Sync, batch_size=4, drop_last=False)
    with pytest.raises(AssertionError, match="rebatched_size"):
        accessor_of(loader)
    assert [len(batch) for batch in accessor_of(loader, rebatched_size=4)] == [4] * 25 + [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("buffer_size", 0),
        ("buffer_size", 1.5),
        ("buffer_size", None),
        ("buffer_size", 10**30),
        ("miss_sleep_time_in_ms", "x"),
        ("load_indefinitely", None),
        ("early_preload", "no"),
        ("sharing_strategy", "Fork"),
        ("timeout", {}),
        ("timeout", -1),
        ("rebatched_size", True),
    ],
)
def test_odd_arguments_are_named(name, value):
    with pytest.raises(AssertionError, match=f"{name} is .*{re.escape(repr(value))}") as caught:
        accessor_of(Inc(), **{name: value})
    assert isinstance(caught.value, poptorch.Error)


def test_what_has_no_elements_is_refused():
    with pytest.raises(AssertionError, match="by iteration or by index, but 3 has neither"):
        accessor_of(3)


def test_what_cannot_be_pickled_says_so():
    class Local(Inc):
        pass

    with pytest.raises(AssertionError, match=r"(?s)cannot be sent.*Local.*SharingStrategy\.Fork"):
        accessor_of(Local(), sharing_strategy=SharingStrategy.SharedMemory)


@pytest.mark.parametrize("strategy", [SharingStrategy.SharedMemory, SharingStrategy.FileSystem])
def test_fresh_processes(strategy):
    accessor = accessor_of(Inc(5), sharing_strategy=strategy, miss_sleep_time_in_ms=0)
    assert [first_values(accessor) for _ in range(2)] == [list(range(5))] * 2


# ---- failing to start


def test_a_broken_data_set(capfd):  # 40
    with pytest.raises(poptorch.Error, match=r"(?s)worker thread failed to start.*a broken sample"):
        accessor_of(loader_of(Failing("exception", at=0), DataLoaderMode.Sync))
    assert "ValueError: a broken sample" in capfd.readouterr().err


@pytest.mark.parametrize("fault", ["exit", "kill"])
def test_a_worker_that_does_not_come_up(fault):
    with pytest.raises(poptorch.Error, match="worker thread failed to start: the worker process"):
        accessor_of(Failing(fault, at=0))


def test_an_empty_data_set(capfd):
    with pytest.raises(poptorch.Error, match=r"(?s)worker thread failed to start.*The Dataset is empty"):
        accessor_of(Inc(0))
    with pytest.raises(poptorch.Error, match="The Dataset is empty"):
        loader_of(Inc(3), batch_size=4)
    assert "The Dataset is empty" in capfd.readouterr().err


def test_data_that_can_be_read_only_once():
    accessor = accessor_of(iter([torch.zeros(1), torch.ones(1)]))
    assert first_values(accessor) == [0, 1]
    with pytest.raises(AssertionError, match="The Dataset is empty"):
        next(iter(accessor))


# ---- slow, but not stalled


def test_a_busy_worker_is_not_stalled():
    patience = Patience(idle=0.5, busy=60.0)
    loader = loader_of(Slow(2, 1.2, computes=True), DataLoaderMode.Sync)
    loader._patience = patience
    assert first_values(accessor_of(loader)) == [0, 1]
    loader = loader_of(Slow(2, 1.2), DataLoaderMode.Sync)
    loader._patience = patience
    accessor = accessor_of(loader)
    with pytest.raises(poptorch.Error, match="idle all the time"):
        first_values(accessor)


# ---- programs


HEAD = """
import os, signal, sys, time
import poptorch
from data_sets import Inc
options = {"sharing_strategy": poptorch.SharingStrategy.Fork}
poptorch.setLogLevel("DEBUG")
loader = poptorch.DataLoader(poptorch.Options(), Inc(50), num_workers=1, mode=poptorch.DataLoaderMode.Async,
                             async_options=options)
worker = loader._accessor._worker.pid
"""


def printed(ran):
    """What a program printed, apart from debug lines."""
    return [line for line in (ran.output + ran.errors).splitlines() if "[debug]" not in line]


def test_leaving_a_loop_and_the_program(programs):  # 36, 43
    ran = programs.run(HEAD + "for batch in loader: break\nprint(worker)")
    (pid,) = printed(ran)
    assert f"AsynchronousDataAccessor worker process: {pid}" in ran.errors
    assert members(group=int(pid)) == {}


@pytest.mark.parametrize("epochs", [0, 1])
def test_an_interrupt_prints_nothing(programs, epochs):  # 42
    code = f"""
for _ in range({epochs}):
    for batch in loader: pass
os.kill(worker, signal.SIGINT)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    sys.exit(0)
"""
    assert printed(programs.run(HEAD + code)) == []


def test_deleting_ends_the_worker():
    loader = loader_of(Inc(), num_workers=1)
    pid = loader._accessor._worker.pid
    del loader
    assert members(group=pid) == {}


def test_an_exception_in_the_loop_leaves_the_loader_usable():
    loader = loader_of(Inc(5))
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loader]
    assert first_values(loader) == list(range(5))


def test_a_killed_worker_does_not_leave_its_torch_workers():
    loader = loader_of(Slow(20, 0.05), num_workers=2)
    pid = loader._accessor._worker.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match=f"the worker process {pid} was killed by SIGKILL"):
        first_values(loader)
    end = time.monotonic() + 5
    while members(group=pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert members(group=pid) == {}
