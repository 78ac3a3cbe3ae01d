"""Options whose replicas and process come from the launcher."""

from __future__ import annotations

import pickle

import pytest

import popdist.poptorch
import poptorch

BLOCKED = [
    ("useIpuId", lambda o: o.useIpuId(1)),
    ("replicationFactor", lambda o: o.replicationFactor(2)),
    ("Distributed.disable", lambda o: o.Distributed.disable()),
    ("Distributed.setEnvVarNames", lambda o: o.Distributed.setEnvVarNames("A", "B")),
    ("Distributed.configureProcessId", lambda o: o.Distributed.configureProcessId(0, 1)),
]


@pytest.mark.parametrize(("name", "call"), BLOCKED, ids=[name for name, _ in BLOCKED])
def test_what_the_launcher_decides_cannot_be_set(name, call):
    options = popdist.poptorch.Options(ipus_per_replica=2)
    with pytest.raises(RuntimeError, match=f"Cannot call `{name}` with popdist.poptorch.Options"):
        call(options)


def test_a_program_alone_is_the_first_of_one_process():
    options = popdist.poptorch.Options(ipus_per_replica=2)
    assert isinstance(options, poptorch.Options)
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)
    assert options.ipus_per_replica == 2


def test_the_launcher_gives_replicas_and_process(monkeypatch):
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "6")
    monkeypatch.setenv("POPDIST_NUM_LOCAL_REPLICAS", "2")
    monkeypatch.setenv("POPDIST_REPLICA_INDEX_OFFSET", "4")
    options = popdist.poptorch.Options()
    assert options.replication_factor == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (2, 3)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_dictionary_leaves_the_frozen_state_as_it_is(is_frozen):
    options = popdist.poptorch.Options().outputMode(poptorch.OutputMode.All)
    if is_frozen:
        options._freeze()
    assert options.toDict()["num_distributed_processes"] == 1
    assert options._is_frozen is is_frozen


def test_copies_stay_what_they_are():
    options = popdist.poptorch.Options(ipus_per_replica=4)
    for twin in (options.clone(), pickle.loads(pickle.dumps(options))):
        assert type(twin) is popdist.poptorch.Options
        assert twin.ipus_per_replica == 4
        with pytest.raises(RuntimeError, match="disable"):
            twin.Distributed.disable()
