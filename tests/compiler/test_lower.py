"""From a graph to an executable: which programs there are, what the schedule does with them, and whose the state is."""

from __future__ import annotations

import pytest
import torch

import poptorch
from compiler.step_graphs import FORWARD, step_graph
from poptorch.compiler.lower import Surroundings, lower
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.executable import Commit, Interface, Run
from poptorch.executable.interface import Arguments
from poptorch.ir import GraphBuilder, Guard, InputSpec, OutputRole, OutputSpec, Role, SourceLine
from poptorch.options import resolve
from poptorch.structure import Constant, Leaf

aten = torch.ops.aten
AROUND = Surroundings(Interface(Arguments(("x",), Leaf(0), Constant(None), ("x",), (), ()), Leaf(0), ("x",)))


def options(**counts: int) -> poptorch.Options:
    made = poptorch.Options().deviceIterations(counts.get("D", 1)).replicationFactor(counts.get("R", 1))
    made.Training.gradientAccumulation(counts.get("G", 1))
    return made.runSideBySide(False)


def lowered(graph, made: poptorch.Options, *, training: bool = True):
    seen = []
    executable = lower(graph, AROUND, resolve(made, training=training), lambda name, each: seen.append(name))
    assert seen == [program.name for program in executable.programs]
    return executable


def product(guards: tuple[Guard, ...] = ()):
    """x * (2 * w) with a weight that nobody changes; with guards also what they ask, and a buffer that changes."""
    builder = GraphBuilder()
    w = builder.input(InputSpec.of("w", Role.PARAMETER, torch.zeros(2)))
    x = builder.input(InputSpec.of("x", Role.USER_INPUT, torch.zeros(2), key="x"))
    doubled = builder.call(FORWARD, aten.mul.Tensor, w, 2.0)
    builder.output(OutputSpec("output0", OutputRole.USER_OUTPUT), builder.call(FORWARD, aten.mul.Tensor, x, doubled))
    if guards:
        count = builder.input(InputSpec.of("count", Role.BUFFER, torch.zeros(2)))
        builder.output(OutputSpec("count", OutputRole.NEW_VALUE), builder.call(FORWARD, aten.add.Tensor, count, x))
        asked = builder.call(FORWARD, aten.gt.Scalar, x, 0.0)
        builder.output(OutputSpec("guards", OutputRole.GUARD), asked)
    return builder.build("step", guards=guards)


def test_an_update_from_one_micro_batch_is_one_program_that_commits_by_itself():
    executable = lowered(step_graph(), options(D=3))
    assert [program.name for program in executable.programs] == ["step"]
    assert executable.schedule.instructions == (Run("step", 0, 0, 0, 0, commits=True),)
    assert (executable.schedule.rounds, executable.schedule.micro_batches) == (3, 1)


@pytest.mark.parametrize(("counts", "runs"), [({"G": 3}, 3), ({"R": 2}, 2), ({"G": 2, "R": 2}, 4)], ids=str)
def test_an_update_from_several_micro_batches_is_two_programs_and_the_second_commits(counts, runs):
    executable = lowered(step_graph(), options(**counts))
    assert [program.name for program in executable.programs] == ["micro_step", "update"]
    *steps, commit = executable.schedule.instructions
    assert [run.micro_batch for run in steps] == list(range(runs))
    assert {run.program for run in steps} == {"micro_step"}
    assert isinstance(commit, Commit)
    assert commit.updates == ("update",)


def test_state_is_bound_once_and_accumulators_belong_to_it():
    executable = lowered(step_graph(), options(G=2))
    roles = {spec.name: spec.role for spec in executable.binding.inputs}
    assert roles == {"w": Role.PARAMETER, "count": Role.BUFFER, "w:accumulator": Role.ACCUMULATOR}


def test_a_micro_batch_returns_what_the_user_gets_and_no_gradient():
    for counts in ({"G": 2}, {"D": 2}):
        assert [spec.name for spec in lowered(step_graph(), options(**counts)).outputs] == ["output0"]


def test_inference_computes_what_depends_on_weights_alone_before_a_call():
    executable = lowered(product(), options(D=2), training=False)
    assert [program.name for program in executable.programs] == ["step", "prepare"]
    assert executable.prepare is not None
    assert "aten.mul.Tensor(w, 2.0)" in str(executable.prepare.graph)
    assert "2.0" not in str(executable.step.graph)


def test_a_step_with_guards_writes_nothing_final_before_they_hold():
    guard = Guard(SourceLine("model.py", 3, "forward"), "x > 0")
    executable = lowered(product((guard,)), options(D=2), training=False)
    run, commit = executable.schedule.instructions
    assert isinstance(run, Run)
    assert not run.commits
    assert isinstance(commit, Commit)
    assert commit.updates == ()


def test_the_batch_plan_says_which_outputs_are_kept():
    kept = {
        OutputMode.All: (0, 1, 2, 3, 4, 5),
        OutputMode.Final: (5,),
        OutputMode.EveryN: (2, 5),
    }
    for mode, expected in kept.items():
        made = options(D=6).outputMode(mode, 3 if mode is OutputMode.EveryN else None)
        assert lowered(product(), made, training=False).batching.kept == expected


def test_equal_graphs_make_equal_executables():
    assert lowered(step_graph(), options(G=2)) == lowered(step_graph(), options(G=2))
    assert lowered(step_graph(), options(G=2)) != lowered(step_graph(), options(G=3))


def test_a_reduction_that_is_gone_is_refused_with_what_to_choose():
    made = options(G=2)
    made.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.PostAndLoss)
    with pytest.raises(poptorch.Error, match="choose Running or Post"):
        lowered(step_graph(), made)
