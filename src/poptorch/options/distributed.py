"""Options about the processes of a program that runs in several of them."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import Self

from poptorch.errors import OptionError, explain
from poptorch.options.checks import at_least_one, not_negative, text, texts, truth
from poptorch.options.group import OptionGroup, Stored, option
from poptorch.processes.place import Launcher, find_place, read_place


class DistributedOptions(OptionGroup):
    """Which of how many processes this one is; one that poprun, torchrun, Open MPI or srun started knows by itself."""

    def __init__(self) -> None:
        super().__init__()
        place = find_place()
        self.configureProcessId(place.index, place.count)

    @option()
    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the number of processes and the index of this one from these environment variables, now."""
        count = text("setEnvVarNames", var_num_processes)
        index = text("setEnvVarNames", var_process_id)
        place = read_place(Launcher("the user's own", count, index, index))
        return self.configureProcessId(place.index, place.count)

    @option(distributed_process_id=Stored(int, 0, least=0), num_distributed_processes=Stored(int, 1, least=1))
    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """State the index of this process, counted from 0, and how many there are."""
        count = at_least_one("configureProcessId num_processes", num_processes)
        index = not_negative("configureProcessId process_id", process_id)
        if index >= count:
            raise OptionError(f"there is no process {index} of {count}: they are counted from 0")
        return self._store(distributed_process_id=index, num_distributed_processes=count)

    @option()
    def disable(self) -> Self:
        """Run alone, whatever the environment says."""
        return self.configureProcessId(0, 1)

    @option(ordered_reduction=False)
    def orderedReduction(self, enabled: bool = True) -> Self:
        """Add up gradients in the order of micro-batches and global replicas, so that weights do not depend on how
        replicas are spread over processes, bit for bit; takes more memory and time, and runs nothing side by side.
        """
        return self._store(ordered_reduction=truth("orderedReduction", enabled))

    @option(processes_per_replica=Stored(int, 1, least=1))
    def processesPerReplica(self, count: int) -> Self:
        """Spread the IPUs of a replica over this many processes; each has the stages of its IPUs, and their weights.

        All of them are called with the same arguments and return the same outputs.
        """
        return self._store(processes_per_replica=at_least_one("processesPerReplica", count))

    @option(ipuof_configs={})
    def IPUoFConfigFiles(self, files: str | Iterable[str]) -> Self:
        """Deprecated: files that describe the partition of each process; recorded only."""
        names = [files] if isinstance(files, str) else texts("IPUoFConfigFiles", files)
        return self._store(ipuof_configs=dict(enumerate(names)))

    @property
    def processId(self) -> int:
        """The index of this process."""
        return self._values["distributed_process_id"]

    @property
    def numProcesses(self) -> int:
        """How many processes there are."""
        return self._values["num_distributed_processes"]


def place_of_data(options: DistributedOptions) -> tuple[int, int]:
    """Which part of the data a process takes, and how many parts there are: those that share replicas take the same."""
    shared = options.processes_per_replica
    if options.numProcesses % shared:
        raise OptionError(
            explain(
                f"{options.numProcesses} processes cannot be divided into groups of {shared}.",
                options=f"Distributed.processesPerReplica({shared})",
                fix="start a multiple of that number of processes, for example with torchrun --nproc-per-node",
            )
        )
    return options.processId // shared, options.numProcesses // shared
