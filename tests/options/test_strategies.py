"""Execution strategies: what their constructors accept, and which stage a block belongs to."""

from __future__ import annotations

import copy
import pickle

import pytest

import poptorch
from poptorch import (
    AutoStage,
    Liveness,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)


def test_stages_list_their_blocks_and_know_their_ipu():
    stage = Stage("a", "b")
    assert stage.blocks == ("a", "b")
    assert stage.ipu(3) is stage
    assert stage.ipu_id == 3


def test_pipelines_take_stages_blocks_and_lists():
    strategy = PipelinedExecution(Stage("a"), "b", ["c", "d"])
    assert [strategy.stage(block).stage_id for block in "abcd"] == [0, 1, 2, 2]


@pytest.mark.parametrize("kind", [PipelinedExecution, ShardedExecution])
def test_stages_can_be_left_to_the_blocks(kind):
    assert kind()._auto_stage is AutoStage.SameAsIpu
    assert kind(AutoStage.AutoIncrement)._auto_stage is AutoStage.AutoIncrement
    assert issubclass(kind, PipelinedExecution)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [(PipelinedExecution(), 0), (ShardedExecution(), 1), (SerialPhasedExecution("a"), 2)],
)
def test_modes_have_numbers(strategy, mode):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All).setExecutionStrategy(strategy)
    assert options.toDict()["execution_mode"] == mode
    poptorch.options.validate(options.toDict())


PHASED = [
    (Phase("a"), Phase("b")),
    (Stage("a"), Stage("b")),
    ([Stage("a"), Stage("c")], [Stage("b"), Stage("d")]),
    (["a"], ["b"]),
    ("a", "b"),
    ([Phase(Stage("a"), Stage("c")), Phase(Stage("b"), Stage("d"))],),
]


@pytest.mark.parametrize("phases", PHASED)
@pytest.mark.parametrize("kind", [SerialPhasedExecution, ParallelPhasedExecution])
def test_phases_can_be_written_in_many_ways(kind, phases):
    strategy = kind(*copy.deepcopy(phases))
    assert [strategy.stage(block).phase_id for block in "ab"] == [0, 1]
    assert strategy.stage("a").ipu(0) is strategy.phase(0).stage(0)


def test_a_phase_gives_each_stage_its_ipu():
    strategy = ParallelPhasedExecution([Stage("0"), Stage("1")], [Stage("2", "4"), Stage("3", "5")])
    assert strategy.phase(0).ipus(0, 2) is None
    strategy.phase(1).ipus(1, 3)
    assert [strategy.stage(block).ipu_id for block in "012345"] == [0, 2, 1, 3, 1, 3]
    assert len(Phase("a", "b").stages) == 1


def test_texts_are_the_blocks_of_one_stage_and_stages_stay_apart():
    assert [stage.blocks for stage in Phase("a", "b").stages] == [("a", "b")]
    assert [stage.blocks for stage in Phase(Stage("a"), Stage("b")).stages] == [("a",), ("b",)]


def test_phased_settings_chain_and_show():
    serial = SerialPhasedExecution("a")
    assert serial._liveness is Liveness.AlwaysLive
    assert serial.setTensorsLiveness(Liveness.OffChipAfterFwd).useSeparateBackwardPhase() is serial
    assert repr(serial).endswith(".useSeparateBackwardPhase().setTensorsLiveness(Liveness.OffChipAfterFwd)")
    parallel = ParallelPhasedExecution("a").sendTensorsOffChipAfterFwd()
    assert parallel._liveness is Liveness.OffChipAfterFwd
    assert parallel.sendTensorsOffChipAfterFwd(False)._liveness is Liveness.AlwaysLive


REFUSED = [
    (lambda: Stage(1), "strings"),
    (lambda: Stage("a").ipu("0"), "int"),
    (lambda: PipelinedExecution("a", ["b", "a"]), "'a' is associated with more than one stage"),
    (lambda: PipelinedExecution(3), "a stage is"),
    (lambda: PipelinedExecution(AutoStage.SameAsIpu, "a"), "a stage is"),
    (lambda: PipelinedExecution("encoder").stage("encodr"), "Unknown block 'encodr'; did you mean 'encoder'"),
    (lambda: Phase("a", Stage("b")), "only"),
    (lambda: Phase(Stage("a")).ipus(0, 1), "2 IPUs for 1 stages"),
    (lambda: Phase(Stage("a"), Stage("b")).ipus(0), "1 IPUs for 2 stages"),
    (lambda: Phase("a").stage(1), "no stage 1"),
    (lambda: SerialPhasedExecution(), "at least one phase"),
    (lambda: ParallelPhasedExecution([]), "at least one Stage"),
    (lambda: SerialPhasedExecution(3), "a phase is"),
    (lambda: SerialPhasedExecution("a", "a"), "more than one stage"),
    (lambda: SerialPhasedExecution("a").phase(-1), "no phase -1"),
    (lambda: SerialPhasedExecution("a").phase("0"), "int"),
    (lambda: SerialPhasedExecution("a").setTensorsLiveness(0), "Liveness"),
    (lambda: SerialPhasedExecution("a").useSeparateBackwardPhase(1), "True or False"),
    (lambda: ParallelPhasedExecution("a").sendTensorsOffChipAfterFwd(None), "True or False"),
]


@pytest.mark.parametrize(("build", "text"), REFUSED)
def test_mistakes_are_assertion_errors_that_say_what_is_wrong(build, text):
    with pytest.raises(AssertionError, match=text):
        build()


@pytest.mark.parametrize(
    "strategy",
    [PipelinedExecution(Stage("a").ipu(1), ["b", "c"]), SerialPhasedExecution([Stage("a"), Stage("b")], "c")],
)
def test_strategies_can_be_pickled_and_copied(strategy):
    for twin in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert repr(twin) == repr(strategy)
        assert " at 0x" not in repr(twin)
        twin.stage("a").ipu(7)
    assert strategy.stage("a").ipu_id != 7
