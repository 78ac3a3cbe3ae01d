"""Stages that are spread over processes: what options can ask for."""

from __future__ import annotations

import pytest

import poptorch
from poptorch.compiler.sections import Sections
from poptorch.compiler.shares import check_shares
from poptorch.errors import CompileError, OptionError
from poptorch.ir import Placement
from poptorch.options import place_of_data, resolve


def options(index, count, per_replica):
    found = poptorch.Options()
    found.Distributed.configureProcessId(index, count).processesPerReplica(per_replica)
    return found


def test_processes_that_share_replicas_take_the_same_data():
    assert [place_of_data(options(index, 4, 2).Distributed) for index in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_processes_are_a_multiple_of_those_of_a_replica():
    with pytest.raises(OptionError, match="3 processes cannot be divided into groups of 2"):
        resolve(options(0, 3, 2), training=True)


def test_each_process_of_a_replica_needs_an_ipu():
    sections = Sections((Placement(ipu=0), Placement(ipu=1, section=1)))
    check_shares(sections, resolve(options(1, 4, 2), training=True))
    with pytest.raises(CompileError, match=r"on 2 IPU\(s\), which cannot be spread over 4 processes"):
        check_shares(sections, resolve(options(1, 4, 4), training=True))


def test_a_process_has_a_part_of_the_ipus_of_each_replica():
    processes = resolve(options(3, 4, 2), training=True).processes
    assert (processes.index, processes.count, processes.part, processes.parts, processes.rank) == (1, 2, 1, 2, 3)
