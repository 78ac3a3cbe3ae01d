"""What a process knows of its siblings."""

from __future__ import annotations

import pytest

import popdist
import poptorch
from popdist.instance import VARIABLES, Instance


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    """The second of three instances with four replicas each, of two IPUs; the first on its machine."""
    values = {
        "POPDIST_NUM_TOTAL_REPLICAS": "12",
        "POPDIST_NUM_LOCAL_REPLICAS": "4",
        "POPDIST_NUM_IPUS_PER_REPLICA": "2",
        "POPDIST_REPLICA_INDEX_OFFSET": "4",
        "POPDIST_LOCAL_INSTANCE_INDEX": "1",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def answers():
    return (
        popdist.isPopdistEnvSet(),
        popdist.getNumInstances(),
        popdist.getInstanceIndex(),
        popdist.getNumTotalReplicas(),
        popdist.getNumLocalReplicas(),
        popdist.getNumIpusPerReplica(),
        popdist.getLocalInstanceIndex(),
        popdist.getDeviceId(),
    )


def test_a_program_alone():
    popdist.init()
    assert answers() == (False, 1, 0, 1, 1, 1, 0, 0)
    popdist.checkNumIpusPerReplica(4)


@pytest.mark.usefixtures("launched")
def test_one_of_several_instances():
    popdist.init()
    assert answers() == (True, 3, 1, 12, 4, 2, 1, 8)
    assert popdist.getDeviceId(2) == 8


@pytest.mark.usefixtures("launched")
def test_another_number_of_ipus_than_the_launcher_was_told_is_refused():
    popdist.checkNumIpusPerReplica(2)
    with pytest.raises(poptorch.Error, match="4 IPUs per replica"):
        popdist.checkNumIpusPerReplica(4)


@pytest.mark.usefixtures("launched")
def test_functions_run_on_the_instances_that_are_named():
    assert popdist.execute_on_instances({1, 2}, lambda a, b: a + b, 1, b=2) == 3
    assert popdist.execute_on_instances({0}, lambda: 1) is None


@pytest.mark.parametrize(
    ("name", "value"), [("POPDIST_NUM_TOTAL_REPLICAS", "many"), ("POPDIST_NUM_LOCAL_REPLICAS", "0")]
)
def test_bad_variables_are_named(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(poptorch.Error, match=name):
        popdist.init()


def test_replicas_must_be_shared_out_evenly():
    with pytest.raises(poptorch.Error, match="7 replicas"):
        Instance(total_replicas=7, local_replicas=2)
