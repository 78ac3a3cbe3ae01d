"""What one process (instance) of a program knows of its siblings.

`poprun` starts each instance with `POPDIST_*` variables; without them a program is alone: one instance, one replica.

>>> import popdist
>>> popdist.isPopdistEnvSet(), popdist.getNumInstances(), popdist.getInstanceIndex()
(False, 1, 0)
"""

from popdist.instance import (
    checkNumIpusPerReplica,
    execute_on_instances,
    getDeviceId,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    init,
    isPopdistEnvSet,
)

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "init",
    "isPopdistEnvSet",
]
