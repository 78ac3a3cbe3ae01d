"""The session follows the schedule on bound state, and leaves nothing half done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.engines import EagerEngine
from poptorch.enums import OutputMode
from poptorch.executable import (
    Arguments,
    Batching,
    Commit,
    Executable,
    Interface,
    Program,
    Run,
    Schedule,
    StateBinding,
)
from poptorch.ir import Direction, GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Role
from poptorch.runtime import Session
from poptorch.structure import Constant, Leaf

aten = torch.ops.aten
NOTE = Note(Direction.FORWARD)


def counting_step() -> Program:
    """y = x + count, and count grows by one."""
    builder = GraphBuilder()
    count = builder.input(InputSpec.of("count", Role.BUFFER, torch.zeros(())))
    x = builder.input(InputSpec.of("x", Role.USER_INPUT, torch.zeros(1), key="x"))
    builder.output(OutputSpec("output0", OutputRole.USER_OUTPUT), builder.call(NOTE, aten.add.Tensor, x, count))
    builder.output(OutputSpec("count", OutputRole.NEW_VALUE), builder.call(NOTE, aten.add.Tensor, count, 1.0))
    return Program(builder.build("step"))


def session(schedule: Schedule, replicas: int = 1) -> tuple[Session, torch.Tensor]:
    """A session of the counting step, and the counter that it works on."""
    step, total = counting_step(), schedule.rounds * schedule.micro_batches
    batching = Batching(
        schedule.rounds, schedule.micro_batches, replicas, tuple(range(total)), tuple(range(total)), False
    )
    interface = Interface(Arguments(("x",), Leaf(0), Constant(None), ("x",), (), ()), Leaf(0))
    executable = Executable((step,), schedule, StateBinding(step.state), batching, interface, outputs=step.returned)
    count = torch.zeros(())
    return Session(executable, EagerEngine().compile([step]), {"count": count}), count


def test_runs_follow_the_order_of_the_schedule_and_outputs_that_of_the_micro_batches():
    runs = tuple(Run("step", 0, place, 0, slot, commits=True) for slot, place in enumerate((1, 0)))
    found, count = session(Schedule(runs, rounds=2, micro_batches=2))
    result = found.run([torch.tensor([10.0, 20.0, 30.0, 40.0])])
    assert result.outputs[0].tolist() == [11, 20, 33, 42]
    assert count.item() == 4
    assert [span.micro_batch for span in result.trace.spans] == [1, 0, 3, 2]


def test_each_replica_has_a_changing_buffer_of_its_own_and_the_owner_sees_the_first():
    runs = tuple(Run("step", place, place, place, 0, commits=True) for place in range(2))
    found, count = session(Schedule(runs, rounds=3, micro_batches=2), replicas=2)
    result = found.run([torch.zeros(6)])
    assert result.outputs[0].tolist() == [0, 0, 1, 1, 2, 2]
    assert count.item() == 3


def test_what_is_not_committed_is_taken_back():
    schedule = Schedule((Run("step", 0, 0, 0, 0), Commit((), (0,), 1)), rounds=2, micro_batches=1)
    found, count = session(schedule)
    commit, calls = found._commit, []

    def fail_the_second_time(updates):
        calls.append(updates)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return commit(updates)

    found._commit = fail_the_second_time
    found.bind({"count": count})
    with pytest.raises(KeyboardInterrupt):
        found.run([torch.zeros(2)])
    assert count.item() == 1  # the first round is final
    found.run([torch.zeros(2)])
    assert count.item() == 3


class Averaging(nn.Module):
    """A batch norm that learns its statistics, behind a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        y = self.norm(x)
        return y * 2 if x.sum() > 0 else y


def test_a_guard_that_fails_in_inference_leaves_buffers_as_they_were(caplog):
    model = Averaging()
    inference = poptorch.inferenceModel(model, poptorch.Options().outputMode(OutputMode.All))
    inference(torch.rand(4, 2))
    inference.copyWeightsToHost()
    before = model.norm.running_mean.clone(), model.norm.num_batches_tracked.item()
    with pytest.raises(poptorch.Error, match="contradicts the value True"):
        inference(-torch.rand(4, 2))
    inference.copyWeightsToHost()
    assert torch.equal(model.norm.running_mean, before[0])
    assert model.norm.num_batches_tracked.item() == before[1] == 1
