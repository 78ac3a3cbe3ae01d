"""`poptorch.Options` that take replicas and process from the environment."""

from __future__ import annotations

from typing import NoReturn

import poptorch
from popdist.instance import checkNumIpusPerReplica, getNumIpusPerReplica, read_instance
from poptorch.options import DistributedOptions


def _blocked(method: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{method}` with popdist.poptorch.Options: the launcher of the program decides it")


class _FixedDistributedOptions(DistributedOptions):
    """The processes that the launcher started; a program can only ask."""

    def disable(self) -> NoReturn:
        """Not available: the launcher decides."""
        _blocked("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> NoReturn:
        """Not available: the launcher decides."""
        _blocked("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id: int, num_processes: int) -> NoReturn:
        """Not available: the launcher decides."""
        _blocked("Distributed.configureProcessId")


class Options(poptorch.Options):
    """Options of one instance: replication factor and process id come from the environment.

    >>> import popdist.poptorch
    >>> popdist.poptorch.Options().Distributed.numProcesses
    1
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            checkNumIpusPerReplica(ipus_per_replica)
        instance = read_instance()
        self._store(replication_factor=instance.local_replicas)
        self.Distributed.configureProcessId(instance.index, instance.count)
        self.Distributed.__class__ = _FixedDistributedOptions
        vars(self)["_ipus_per_replica"] = getNumIpusPerReplica() if ipus_per_replica is None else ipus_per_replica

    @property
    def ipus_per_replica(self) -> int:
        """How many IPUs each replica uses."""
        return vars(self)["_ipus_per_replica"]

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Not available: the launcher decides."""
        _blocked("replicationFactor")

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """Not available: the launcher decides."""
        _blocked("useIpuId")
