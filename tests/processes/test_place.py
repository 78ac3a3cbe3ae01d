"""Where a process is, as launchers say it."""

from __future__ import annotations

import pytest

import poptorch
from poptorch.errors import VariableError
from poptorch.processes import Place, find_place
from poptorch.processes.place import Meeting, find_meeting

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Place()),
        (TORCHRUN, Place(3, 8, 1, "torchrun")),
        (MPI, Place(2, 4, 0, "Open MPI")),
        (SLURM, Place(5, 6, 1, "SLURM")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, Place()),  # a script that runs once, for all its tasks
        ({**SLURM, **MPI}, Place(2, 4, 0, "Open MPI")),  # mpirun inside of a job
    ],
)
def test_each_launcher_is_known_by_its_variables(variables, place, monkeypatch):
    assert find_place(variables) == place
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = poptorch.Options()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (place.index, place.count)


@pytest.mark.parametrize("variables", [{"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "x", "WORLD_SIZE": "8"}])
def test_variables_that_make_no_sense_are_named(variables):
    with pytest.raises(poptorch.Error, match=r"RANK is '?[8x]"):
        find_place(variables)


@pytest.mark.parametrize(
    ("variables", "meeting"),
    [
        ({"MASTER_ADDR": "here", "MASTER_PORT": "77"}, Meeting("here", 77)),
        ({"MASTER_ADDR": "here"}, Meeting("here", 29500)),
        ({"SLURM_STEP_NODELIST": "node7", "SLURM_JOB_ID": "12345"}, Meeting("node7", 22345)),
        ({"SLURM_JOB_NODELIST": "node[07-09,12],big1", "SLURM_JOB_ID": "1"}, Meeting("node07", 20001)),
        ({"SLURM_JOB_NODELIST": "a-[3,5]-x,b", "SLURM_JOB_ID": "1"}, Meeting("a-3-x", 20001)),
        ({"SLURM_JOB_NODELIST": "big1,big2", "SLURM_JOB_ID": "1"}, Meeting("big1", 20001)),
    ],
)
def test_processes_meet_where_the_environment_says(variables, meeting):
    assert find_meeting(Place(1, 2), variables) == meeting


def test_without_a_place_to_meet_the_error_says_how_to_start_the_program():
    with pytest.raises(VariableError, match=r"(?s)process 1 of 2.*poprun or torchrun"):
        find_meeting(Place(1, 2), {})
