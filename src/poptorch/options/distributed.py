"""Options about the processes of a program that runs in several of them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from typing_extensions import Self

from poptorch.errors import OptionError, OptionValueError
from poptorch.options.checks import at_least_one, not_negative, text, texts
from poptorch.options.group import OptionGroup, Stored, option


class DistributedOptions(OptionGroup):
    """Which of how many processes this one is; a program started by OpenMPI knows by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @option()
    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the number of processes and the index of this one from these environment variables, now."""
        count = _read(text("setEnvVarNames", var_num_processes), 1)
        index = _read(text("setEnvVarNames", var_process_id), 0)
        if not 0 <= index < count:
            names = f"{var_process_id} is {index} and {var_num_processes} is {count}"
            raise OptionValueError(
                f"environment variables: {names}, but the first must be one of 0 to the second less 1"
            )
        return self.configureProcessId(index, count)

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


def _read(variable: str, default: int) -> int:
    value = os.environ.get(variable)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise OptionValueError(f"environment variable {variable} is {value!r}, but must be an integer") from None
