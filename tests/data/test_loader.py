"""`poptorch.DataLoader`; numbers in comments are those of the statements in the specification."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

import poptorch
from data_sets import (
    Dicts,
    GrowingBatches,
    Inc,
    IncIter,
    IncIterLen,
    RandomBatches,
    Records,
    RecordsParser,
    pad_records_to,
    pad_to,
    split_init,
)
from poptorch import DataLoaderMode, SharingStrategy

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Length of IterableDataset")

SYNC, ASYNC, REBATCHED = DataLoaderMode
ALL_MODES = pytest.mark.parametrize("mode", DataLoaderMode, ids=lambda mode: mode.name)
FORK = {"sharing_strategy": SharingStrategy.Fork}


def options_of(d=1, r=1, g=1, processes=1, process=0, seed=None):
    options = poptorch.Options().deviceIterations(d).replicationFactor(r)
    options.Training.gradientAccumulation(g)
    options.Distributed.configureProcessId(process, processes)
    return options if seed is None else options.randomSeed(seed)


def loader_of(dataset, options=None, mode=SYNC, **arguments):
    if mode is not SYNC:
        arguments["async_options"] = {**FORK, **arguments.get("async_options", {})}
    return poptorch.DataLoader(options or options_of(), dataset, mode=mode, **arguments)


def elements(loader):
    """The index of every row of an epoch, in the order of delivery."""
    return [int(row.flatten()[0]) for batch in loader for row in batch]


def shapes(loader):
    return [tuple(batch.shape) for batch in loader]


# ---- sizes and order


@ALL_MODES
@pytest.mark.parametrize(
    ("batch_size", "d", "r", "workers", "combined", "length"),
    [
        (1, 1, 1, 0, 1, 100),  # 1
        (4, 1, 1, 0, 4, 25),  # 2
        (1, 1, 1, 8, 1, 100),  # 3
        (1, 4, 1, 0, 4, 25),  # 4
        (1, 1, 4, 0, 4, 25),  # 5
        (2, 5, 2, 4, 20, 5),  # 6
        (2, 10, 1, 0, 20, 5),  # 7
    ],
)
def test_sizes_and_order(mode, batch_size, d, r, workers, combined, length):
    loader = loader_of(Inc(100), options_of(d, r), mode, batch_size=batch_size, num_workers=workers)
    assert (loader.combinedBatchSize, len(loader)) == (combined, length)
    assert shapes(loader) == [(combined, 2, 3)] * length
    assert elements(loader) == list(range(100))


@pytest.mark.parametrize(("r", "n", "length"), [(1, 100, 50), (4, 10, 1)])
def test_async_over_several_epochs(r, n, length):  # 8, 9
    loader = loader_of(Inc(n), options_of(r=r), ASYNC, batch_size=2)
    assert len(loader) == length
    assert [elements(loader) for _ in range(3)] == [list(range(length * 2 * r))] * 3


@ALL_MODES
def test_dictionaries(mode):  # 11
    loader = loader_of(Dicts(500), options_of(d=2, r=3), mode, num_workers=3)
    items = [{key: tensor.clone() for key, tensor in item.items()} for item in loader]
    assert len(items) == 83
    assert all(list(item) == ["data", "label"] for item in items)
    assert all(item["data"].shape == (6, 2, 3) and item["label"].shape == (6, 1) for item in items)
    assert [int(label) for item in items for label in item["label"]] == list(range(498))


def test_combined_batch_size_of_all_factors():  # 12
    loader = loader_of(Inc(100), options_of(d=2, r=3, g=2), batch_size=4)
    assert loader.combinedBatchSize == 48


def test_elements_without_batching():  # 13
    loader = loader_of(IncIter(7), mode=ASYNC, batch_size=None, drop_last=False)
    assert loader.combinedBatchSize is None
    for _ in range(2):
        assert shapes(loader) == [(2, 3)] * 7


def test_length_of_iterable_data():  # 14
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader_of(IncIter(10)))
    assert len(loader_of(IncIterLen(10), batch_size=4)) == 2


def test_the_default_strategy_is_a_fork_server():
    loader = poptorch.DataLoader(options_of(), Inc(10), batch_size=2, mode=ASYNC)
    assert elements(loader) == list(range(10))


# ---- distributed


@ALL_MODES
@pytest.mark.parametrize(
    ("processes", "batch_size", "workers", "length", "total"), [(3, 4, 0, 8, 96), (2, 2, 3, 25, 100)]
)
def test_processes_continue_each_other(mode, processes, batch_size, workers, length, total):  # 16, 17
    parts = []
    for process in range(processes):
        options = options_of(processes=processes, process=process)
        loader = loader_of(Inc(100), options, mode, batch_size=batch_size, num_workers=workers)
        assert len(loader) == length
        parts += elements(loader)
    assert parts == list(range(total))


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
@pytest.mark.parametrize(("processes", "batch_size", "workers", "per_epoch"), [(3, 4, 0, 32), (2, 2, 3, 50)])
def test_processes_shuffle_together(mode, processes, batch_size, workers, per_epoch):  # 18, 19
    seen = set()
    by_epoch = [[], []]
    for process in range(processes):
        options = options_of(processes=processes, process=process, seed=42)
        loader = loader_of(Inc(100), options, mode, batch_size=batch_size, num_workers=workers, shuffle=True)
        for epoch in by_epoch:
            own = elements(loader)
            assert len(own) == len(set(own)) == per_epoch
            epoch += own
            seen |= set(own)
    assert seen == set(range(100))
    assert all(len(epoch) == len(set(epoch)) for epoch in by_epoch)


@pytest.mark.parametrize("processes", [2, 3, 4, 5])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_epoch_has_other_samples(processes, workers):  # 20
    for process in range(processes) if workers == 0 else [1]:
        options = options_of(processes=processes, process=process, seed=0)
        loader = loader_of(Inc(100), options, batch_size=16, num_workers=workers, shuffle=True)
        epochs = [sorted(elements(loader)) for _ in range(5)]
        assert all(one != other for one, other in itertools.combinations(epochs, 2))


def test_shuffling_together_needs_a_seed():  # 21
    with pytest.raises(AssertionError, match=r"poptorch\.Options\.randomSeed"):
        loader_of(Inc(100), options_of(processes=2), shuffle=True)


def test_what_cannot_be_divided():  # 22
    with pytest.raises(AssertionError, match="IterableDataset cannot be divided"):
        loader_of(IncIter(100), options_of(processes=2))
    with pytest.raises(AssertionError, match="batch_size=None"):
        loader_of(Inc(100), options_of(processes=2), batch_size=None)
    with pytest.raises(poptorch.Error, match="a sampler cannot be divided"):
        loader_of(Inc(100), options_of(processes=2), sampler=RandomSampler(Inc(100)))


def test_division_can_be_turned_off():
    loader = loader_of(Inc(10), options_of(processes=2), auto_distributed_partitioning=False)
    assert elements(loader) == list(range(10))


@ALL_MODES
def test_shares_of_all_samples(mode):
    parts = []
    for process in range(3):
        options = options_of(processes=3, process=process)
        parts.append(elements(loader_of(Inc(100), options, mode, batch_size=4, drop_last=False)))
    assert [len(part) for part in parts] == [34, 33, 33]
    assert list(itertools.chain(*parts)) == list(range(100))


# ---- iterable data and rebatching


@ALL_MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_iterable_data_with_workers(mode, dtype):  # 23
    arguments = {"batch_size": 4, "num_workers": 7, "worker_init_fn": split_init}
    loader = loader_of(IncIter(101, dtype=dtype), mode=mode, **arguments)
    for _ in range(2):
        found = [batch.clone() for batch in loader]
        assert {(tuple(batch.shape), batch.dtype) for batch in found} == {((4, 2, 3), dtype)}
        assert len({int(row[0, 0]) for batch in found for row in batch}) == (100 if mode is REBATCHED else 80)


@ALL_MODES
def test_indexed_data_with_workers(mode):  # 24, 25
    loader = loader_of(Inc(101), mode=mode, batch_size=4, num_workers=7)
    assert len(loader) == 25
    for _ in range(2):
        assert elements(loader) == list(range(100))


@ALL_MODES
def test_length_is_theoretical_for_iterable_data(mode):  # 26
    loader = loader_of(IncIterLen(101), mode=mode, batch_size=4, num_workers=7, worker_init_fn=split_init)
    assert len(loader) == 25
    assert len(shapes(loader)) == (25 if mode is REBATCHED else 20)


def rows_of(loader):
    return sorted(len(batch) for batch in loader)


def test_remainder_of_indexed_data():  # 29
    loader = loader_of(Inc(101), batch_size=6, drop_last=False, num_workers=7)
    assert len(loader) == 17
    for _ in range(2):
        assert rows_of(loader) == [5] + [6] * 16


def test_remainders_of_iterable_data():  # 30
    arguments = {"batch_size": 6, "drop_last": False, "num_workers": 7, "worker_init_fn": split_init}
    assert rows_of(loader_of(IncIterLen(101), **arguments)) == [3] * 6 + [5] + [6] * 13


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", [Inc, IncIterLen])
def test_one_remainder_when_rebatched(mode, kind):  # 31
    init = split_init if kind is IncIterLen else None
    loader = loader_of(kind(101), mode=mode, batch_size=6, drop_last=False, num_workers=7, worker_init_fn=init)
    assert len(loader) == 17
    for _ in range(2):
        assert rows_of(loader) == [5] + [6] * 16


@pytest.mark.parametrize("worker_size", [1, 2, 3, 4, None])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), [(Inc, torch.float32), (IncIter, torch.float16)])
def test_workers_load_in_other_sizes(worker_size, drop_last, kind, dtype):  # 32
    loader = loader_of(
        kind(101, dtype=dtype),
        mode=REBATCHED,
        batch_size=4,
        drop_last=drop_last,
        num_workers=2,
        worker_init_fn=split_init if kind is IncIter else None,
        rebatched_worker_size=worker_size,
    )
    for _ in range(2):
        found = [batch.clone() for batch in loader]
        assert [len(batch) for batch in found] == [4] * 25 + [1] * (not drop_last)
        assert len({int(row[0, 0]) for batch in found for row in batch}) == 101 - drop_last


def test_rebatched_size_belongs_to_the_mode():  # 34
    with pytest.raises(AssertionError, match="AsyncRebatched"):
        loader_of(Inc(), mode=ASYNC, async_options={"rebatched_size": 4})


# ---- the same seed, the same order


@pytest.mark.parametrize("persistent", [None, False])
def test_order_does_not_depend_on_workers_or_mode(persistent):
    orders = []
    for mode, workers in [(SYNC, 0), (SYNC, 1), (SYNC, 3), (ASYNC, 0), (ASYNC, 2), (REBATCHED, 2)]:
        torch.manual_seed(7)
        keep = None if workers == 0 else persistent
        loader = loader_of(Inc(40), mode=mode, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=keep)
        orders.append([elements(loader) for _ in range(3)])
    assert orders[0][0] != orders[0][1]
    assert all(order == orders[0] for order in orders)


def test_order_is_that_of_pytorch():
    torch.manual_seed(3)
    plain = torch.utils.data.DataLoader(Inc(40), batch_size=4, shuffle=True)
    expected = [elements(plain) for _ in range(2)]
    torch.manual_seed(3)
    loader = loader_of(Inc(40), batch_size=4, shuffle=True)
    assert [elements(loader) for _ in range(2)] == expected


def test_two_loaders_do_not_share_their_order():
    torch.manual_seed(3)
    one, other = (loader_of(Inc(40), mode=ASYNC, shuffle=True) for _ in range(2))
    assert elements(one) != elements(other)


# ---- batch samplers


@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("d", [1, 4, 5])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 10])
def test_batches_of_a_sampler_are_joined(batch_size, d, drop_last, workers):  # 50
    sampler = BatchSampler(SequentialSampler(Inc(100)), batch_size, drop_last)
    loader = loader_of(Inc(100), options_of(d), batch_sampler=sampler, drop_last=drop_last, num_workers=workers)
    assert loader.combinedBatchSize == batch_size * d
    found = list(loader)
    assert len(loader) == len(found)
    whole, rest = divmod(100, batch_size * d)
    assert [len(item) for item in found] == [batch_size * d] * whole + [rest] * (not drop_last and rest > 0)
    assert elements(found) == list(range(sum(map(len, found))))


@pytest.fixture
def records():
    poptorch.registerCustomArgParser(Records, RecordsParser())
    yield
    poptorch.registerCustomArgParser(Records, None)


def rows_and_kind(item):
    data = item.data if isinstance(item, Records) else item[0]
    label = item.label if isinstance(item, Records) else item[1]
    assert len(data) == len(label)
    return type(item), len(data)


@ALL_MODES
@pytest.mark.parametrize("largest", [4, 11])
@pytest.mark.parametrize("d", [1, 5])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("as_records", [True, False])
@pytest.mark.usefixtures("records")
def test_batches_of_different_size(mode, largest, d, workers, drop_last, as_records):  # 51, 56
    sampler = GrowingBatches(149, largest)
    loader = loader_of(
        Inc(149),
        options_of(d),
        mode,
        batch_sampler=sampler,
        collate_fn=(pad_records_to if as_records else pad_to)(largest),
        num_workers=workers,
        drop_last=drop_last,
    )
    kind = Records if as_records else (tuple if mode is SYNC else list)
    whole, rest = divmod(len(sampler), d)
    sizes = [largest * d] * whole + [largest * rest] * (rest > 0 and not drop_last)
    assert len(loader) == len(sizes)
    assert [rows_and_kind(item) for item in loader] == [(kind, size) for size in sizes]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_padding_without_a_sampler(batch_size):  # 52
    loader = loader_of(Inc(20), mode=ASYNC, batch_size=batch_size, collate_fn=pad_to(6))
    assert [len(data) for data, _ in loader] == [6] * (20 // batch_size)


@ALL_MODES
def test_a_sampler_without_a_length(mode):  # 53
    loader = loader_of(Inc(111), options_of(d=2), mode, batch_sampler=RandomBatches(111, 13), collate_fn=pad_to(13))
    sizes = {len(data) for data, _ in loader}
    assert sizes == {26}


def test_what_a_batch_sampler_excludes():  # 54, 55
    sampler = GrowingBatches(100, 4)
    with pytest.raises(poptorch.Error, match="batch_size=4"):
        loader_of(Inc(100), batch_sampler=sampler, batch_size=4)
    with pytest.raises(poptorch.Error, match="shuffle=True"):
        loader_of(Inc(100), batch_sampler=sampler, shuffle=True)
    with pytest.raises(poptorch.Error, match="batch_sampler cannot be divided"):
        loader_of(Inc(100), options_of(processes=2), batch_sampler=sampler)
    loader_of(Inc(100), options_of(processes=2), batch_sampler=sampler, auto_distributed_partitioning=False)


# ---- options


def test_options_are_frozen():  # 57, 59; options 30, 33; runtime 55
    options = options_of()
    loader = loader_of(Inc(), options)
    assert loader.options is options
    for change in (
        lambda: options.randomSeed(42),
        lambda: loader.options.set(random_seed=42),
        lambda: options.Training.gradientAccumulation(2),
        lambda: options._Popart.set("groupNormStridedChannelGrouping", True),
        lambda: setattr(options, "replication_factor", 2),
    ):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change()


def test_a_copy_of_frozen_options_can_be_changed():  # 58
    options = options_of()
    loader_of(Inc(), options)
    for twin in (copy.deepcopy(options), options.clone()):
        twin.deviceIterations(4).Training.gradientAccumulation(2)
        twin.Distributed.configureProcessId(1, 2)
        twin._Popart.set("groupNormStridedChannelGrouping", True)
        twin.TensorLocations.numIOTiles(32)
        twin.Precision.enableStochasticRounding(True)
        changed = (twin.device_iterations, twin.Training.gradient_accumulation, twin.Distributed.processId)
        assert changed == (4, 2, 1)
        assert {"groupNormStridedChannelGrouping", "enableStochasticRounding"} <= set(twin._Popart.options)
        assert (options.device_iterations, options.Distributed.numProcesses) == (1, 1)
        assert "enableStochasticRounding" not in options._Popart.options


def test_the_first_argument_is_options():
    with pytest.raises(AssertionError, match=r"a poptorch\.Options, not a list"):
        poptorch.DataLoader([1, 2], poptorch.Options())


class NoLength:
    def __getitem__(self, index):
        return torch.zeros(1)


ODD = [
    ({"dataset": 3}, "dataset gives samples by index.*but 3 does and is not"),
    ({"dataset": NoLength()}, "NoLength has no length"),
    ({"batch_size": "x"}, "batch_size is 'x', but a micro-batch has a number of rows, at least 1"),
    ({"batch_size": 2.0}, "batch_size is 2.0"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"batch_size": True}, "batch_size is True"),
    ({"batch_size": 2**62}, "a call takes 9223372036854775808 rows"),
    ({"shuffle": "yes"}, "shuffle is True or False, not 'yes'"),
    ({"num_workers": None}, "num_workers is None, but it is a number of processes, at least 0"),
    ({"num_workers": -1}, "num_workers is -1"),
    ({"num_workers": 1.5}, "num_workers is 1.5"),
    ({"drop_last": None}, "drop_last is True or False, not None"),
    ({"persistent_workers": torch.ones(2)}, "persistent_workers is True or False"),
    ({"auto_distributed_partitioning": {}}, "auto_distributed_partitioning is True or False"),
    ({"mode": "Async"}, "mode is one of DataLoaderMode.Sync, DataLoaderMode.Async, .*not 'Async'"),
    ({"async_options": 3}, "async_options is a dictionary of arguments, not 3"),
    ({"async_options": {"buffersize": 3}}, "async_options has no argument 'buffersize'; did you mean 'buffer_size'"),
    ({"mode": REBATCHED, "rebatched_worker_size": "x"}, "rebatched_worker_size is 'x'"),
    ({"mode": REBATCHED, "rebatched_worker_size": 1.5}, "rebatched_worker_size is 1.5"),
    ({"batch_size": 1, "batch_sampler": 3}, "batch_sampler gives the indices.*which 3 does not"),
    ({"sampler": 3}, "sampler gives the indices"),
    ({"collate_fn": 3}, "collate_fn is a function, or None, not 3"),
    ({"worker_init_fn": 3}, "worker_init_fn is a function"),
    ({"generator": 3}, "generator is a torch.Generator, not 3"),
    ({"timeout": None}, "timeout is a number, not None"),
    ({"timeout": -1}, "timeout is a number of seconds"),
    ({"timeout": float("nan")}, "timeout is a number, not nan"),
]


@pytest.mark.parametrize(("arguments", "text"), ODD)
def test_odd_arguments_are_named_and_leave_the_options_alone(arguments, text):
    options = options_of(d=2)
    with pytest.raises(AssertionError, match=text) as caught:
        poptorch.DataLoader(options, **{"dataset": Inc(20), "batch_size": 2, **arguments})
    assert isinstance(caught.value, poptorch.Error)
    options.deviceIterations(3)


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    size, yes = numpy.int64(2), numpy.bool_(True)
    loader = loader_of(Inc(21), batch_size=size, num_workers=numpy.int32(0), drop_last=yes, shuffle=numpy.bool_(False))
    assert shapes(loader) == [(2, 2, 3)] * 10


def test_groups_of_replicas_that_no_longer_divide_them_are_refused():
    options = options_of(r=4).inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive).replicationFactor(2)
    with pytest.raises(poptorch.Error, match="groups of 4, which do not divide 2 replicas"):
        loader_of(Inc(20), options)


def test_arguments_by_keyword():
    loader = poptorch.DataLoader(dataset=Inc(4), options=options_of())
    assert len(loader) == 4


# ---- warnings


@pytest.fixture
def warned(monkeypatch):
    found = []
    monkeypatch.setattr(poptorch.logger, "warning", lambda text, *args: found.append(text % args))
    return found


def test_a_remainder_is_announced(warned):
    loader_of(Inc(101), batch_size=4, drop_last=False)
    assert "101 elements, which is not a multiple of the combined batch size 4 times 1" in warned[0]
    warned.clear()
    loader_of(Inc(100), batch_size=4, drop_last=False)
    loader_of(Inc(101), batch_size=4)
    assert warned == []


def test_repeated_elements_are_announced(warned):
    loader_of(IncIter(10), num_workers=2)
    assert "each element will be returned 2 times" in warned[0]


def test_incomplete_groups_are_announced(warned):
    loader_of(Inc(100), options_of(d=3), batch_sampler=GrowingBatches(10, 4), drop_last=False)
    assert "gives 4 batches, which is not a multiple of the 3" in warned[0]
    loader_of(Inc(100), options_of(d=3), batch_sampler=RandomBatches(10, 4), drop_last=False)
    assert "has no length" in warned[1]


# ---- life cycle


def test_terminating_twice():  # 47
    loader_of(Inc()).terminate()
    loader = loader_of(Inc(), mode=ASYNC)
    loader.terminate()
    loader.terminate()
    with pytest.raises(AssertionError, match="terminated"):
        iter(loader)


@ALL_MODES
def test_a_loader_is_a_context(mode):
    with loader_of(Inc(10), mode=mode, num_workers=1) as loader:
        assert elements(loader) == list(range(10))
    if mode is not SYNC:
        with pytest.raises(AssertionError, match="terminated"):
            next(iter(loader))
