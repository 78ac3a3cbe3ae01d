"""Which of how many processes this one is, as the launcher of the program says in the environment.

Programs are started by torchrun (which `poprun` calls), by Open MPI, or by SLURM's srun. Each sets variables of its
own; the first launcher of the list that has set them is the one that counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from poptorch.errors import OptionValueError, VariableError, explain


@dataclass(frozen=True)
class Launcher:
    """A way to start programs, and the variables by which it tells each process where it is."""

    name: str
    count: str
    index: str
    local_index: str


LAUNCHERS = (
    Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    # of the step, which srun sets: those of the job are also there in a script that runs once for all its tasks
    Launcher("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Place:
    """The place of one process among those of the program."""

    index: int = 0
    count: int = 1
    local_index: int = 0  # among those of this machine
    launcher: str | None = None


@dataclass(frozen=True)
class Meeting:
    """Where processes find each other: a host and a port that the first process, or its launcher, listens on."""

    host: str
    port: int


def read_integer(variable: str, default: int, environment: Mapping[str, str] | None = None) -> int:
    """The value of an environment variable."""
    value = (os.environ if environment is None else environment).get(variable)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise OptionValueError(f"environment variable {variable} is {value!r}, but must be an integer") from None


def read_place(launcher: Launcher, environment: Mapping[str, str] | None = None) -> Place:
    """The place that the variables of a launcher describe; alone, if they are not set."""
    count = read_integer(launcher.count, 1, environment)
    index = read_integer(launcher.index, 0, environment)
    if not 0 <= index < count:
        names = f"{launcher.index} is {index} and {launcher.count} is {count}"
        raise OptionValueError(f"environment variables: {names}, but the first must be one of 0 to the second less 1")
    return Place(index, count, read_integer(launcher.local_index, index, environment), launcher.name)


def find_place(environment: Mapping[str, str] | None = None) -> Place:
    """The place of this process, by the first launcher that says something about it."""
    known = os.environ if environment is None else environment
    for launcher in LAUNCHERS:
        if launcher.count in known and launcher.index in known:
            return read_place(launcher, environment)
    return Place()


def is_meeting_known(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment says where the processes meet."""
    known = os.environ if environment is None else environment
    return bool(known.get("MASTER_ADDR") or _first_host(known))


def find_meeting(place: Place, environment: Mapping[str, str] | None = None) -> Meeting:
    """Where the processes meet: at `MASTER_ADDR` and `MASTER_PORT`, or where SLURM put the first of them."""
    known = os.environ if environment is None else environment
    host = known.get("MASTER_ADDR") or _first_host(known)
    if host is None:
        raise VariableError(
            explain(
                f"this is process {place.index} of {place.count}, but nothing says where the others are.",
                fix="start the program with poprun or torchrun, or set MASTER_ADDR to the name of the machine of "
                "process 0 and MASTER_PORT to a free port there, the same for all processes",
            )
        )
    return Meeting(host, read_integer("MASTER_PORT", _port_of_job(known), known))


def _first_host(known: Mapping[str, str]) -> str | None:
    """The machine of process 0, if SLURM started the program; `node[03-05,9],login` means node03 and more."""
    nodes = known.get("SLURM_STEP_NODELIST") or known.get("SLURM_JOB_NODELIST")
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes) if nodes else None
    return "".join(part or "" for part in found.groups()) if found else None


def _port_of_job(known: Mapping[str, str]) -> int:
    """A port that all processes of a job know, and those of other jobs hardly ever use; by default torch's."""
    job = read_integer("SLURM_JOB_ID", -1, known)
    return 29500 if job < 0 else 20000 + job % 10000
