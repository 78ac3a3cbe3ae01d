"""The `POPDIST_*` variables, and the questions that programs ask about them.

`read_instance` turns the variables into one frozen `Instance`; every function answers from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import poptorch
from poptorch.processes import connect, find_place, is_meeting_known

T = TypeVar("T")

TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
REPLICA_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INDEX = "POPDIST_LOCAL_INSTANCE_INDEX"
UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
VARIABLES = (TOTAL_REPLICAS, LOCAL_REPLICAS, IPUS_PER_REPLICA, REPLICA_OFFSET, LOCAL_INDEX, UNIFORM)


@dataclass(frozen=True)
class Instance:
    """The place of one process among its siblings; all have the same number of replicas."""

    total_replicas: int = 1
    local_replicas: int = 1
    ipus_per_replica: int = 1
    replica_offset: int = 0
    local_index: int = 0

    def __post_init__(self) -> None:
        counts = {
            TOTAL_REPLICAS: self.total_replicas,
            LOCAL_REPLICAS: self.local_replicas,
            IPUS_PER_REPLICA: self.ipus_per_replica,
        }
        for name, count in counts.items():
            if count < 1:
                raise poptorch.Error(f"environment variable {name} is {count}, but counts something")
        if self.total_replicas % self.local_replicas:
            raise poptorch.Error(
                f"{self.total_replicas} replicas ({TOTAL_REPLICAS}) cannot be shared out as {self.local_replicas} "
                f"({LOCAL_REPLICAS}) for each instance"
            )

    @property
    def count(self) -> int:
        """How many instances there are."""
        return self.total_replicas // self.local_replicas

    @property
    def index(self) -> int:
        """Which of them this one is, counted from 0."""
        return self.replica_offset // self.local_replicas


def read_instance() -> Instance:
    """The instance that the environment describes.

    `poprun` says how many replicas there are, and torchrun, which it calls, which of the processes this one is.
    """
    place = find_place()
    local_replicas = _integer(LOCAL_REPLICAS, 1)
    return Instance(
        total_replicas=_integer(TOTAL_REPLICAS, place.count * max(1, local_replicas)),
        local_replicas=local_replicas,
        ipus_per_replica=_integer(IPUS_PER_REPLICA, 1),
        replica_offset=_integer(REPLICA_OFFSET, place.index * local_replicas),
        local_index=_integer(LOCAL_INDEX, place.local_index),
    )


def _integer(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    try:
        return int(value)
    except ValueError:
        raise poptorch.Error(f"environment variable {variable} is {value!r}, but must be an integer") from None


def isPopdistEnvSet() -> bool:
    """Whether this process was started as one of several instances."""
    return any(variable in os.environ for variable in VARIABLES)


def init() -> None:
    """Check what the environment says about this instance, and join the others if it says where they are.

    Call it before anything else. A model that is trained joins the others by itself.
    """
    instance = read_instance()
    if instance.count > 1 and is_meeting_known():
        connect(instance.index, instance.count)


def getNumInstances() -> int:
    """How many instances there are."""
    return read_instance().count


def getInstanceIndex() -> int:
    """Which instance this is, counted from 0."""
    return read_instance().index


def getNumTotalReplicas() -> int:
    """How many replicas all instances have together."""
    return read_instance().total_replicas


def getNumLocalReplicas() -> int:
    """How many replicas this instance has."""
    return read_instance().local_replicas


def getNumIpusPerReplica() -> int:
    """How many IPUs each replica uses."""
    return read_instance().ipus_per_replica


def getLocalInstanceIndex() -> int:
    """Which of the instances on this machine this is, counted from 0."""
    return read_instance().local_index


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """The first IPU of this instance, if instances of this machine share its IPUs out in order."""
    instance = read_instance()
    if ipusPerReplica:
        checkNumIpusPerReplica(ipusPerReplica)
    return instance.local_index * instance.local_replicas * instance.ipus_per_replica


def checkNumIpusPerReplica(num_ipus: int) -> None:
    """Raise if the program uses another number of IPUs per replica than it was started for."""
    expected = getNumIpusPerReplica()
    if isPopdistEnvSet() and num_ipus != expected:
        raise poptorch.Error(f"the program uses {num_ipus} IPUs per replica, but {IPUS_PER_REPLICA} is {expected}")


def execute_on_instances(instances: Collection[int], function: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """Call a function on these instances only, and give its result there."""
    return function(*args, **kwargs) if getInstanceIndex() in instances else None
