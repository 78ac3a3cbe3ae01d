"""What strategies demand of the blocks of a model, and the errors that say so."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch._logging import warn_once


class Blocks(nn.Module):
    """A linear layer in each of these blocks; with a target it returns a loss."""

    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in blocks)
        self.blocks = blocks

    def forward(self, x, target=None):
        for (name, ipu), layer in zip(self.blocks, self.layers, strict=True):
            poptorch.Block.start(name, ipu_id=ipu)
            x = layer(x)
        return x if target is None else (x, F.mse_loss(x, target))


def on_ipus(*ipus):
    return Blocks(*((f"B{number}", ipu) for number, ipu in enumerate(ipus)))


def infer(model, strategy=None, iterations=1, **how):
    options = poptorch.Options().deviceIterations(iterations)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    for name, value in how.items():
        getattr(options, name)(value)
    inference = poptorch.inferenceModel(model, options)
    inference(torch.ones(iterations * how.get("replicationFactor", 1), 4))
    return inference


def train(model, accumulation, strategy=None, iterations=1):
    options = poptorch.Options().deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = accumulation * iterations
    training(torch.ones(rows, 4), torch.ones(rows, 4))
    return training


@pytest.mark.parametrize("accumulation", [4, 5])
def test_a_training_pipeline_must_be_filled(accumulation):
    with pytest.raises(poptorch.Error) as caught:
        train(on_ipus(0, 1, 2, 3), accumulation)
    for fragment in (
        "gradientAccumulation must be greater than or equal to the number of pipeline stages (7)",
        "4 pipeline stages",
        "an additional 3 stages when training",
    ):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_full_training_pipeline_runs(iterations):
    assert train(on_ipus(0, 1, 2, 3), 7, iterations=iterations)._executable.timeline.sections == 4


def test_two_sections_need_three_micro_batches():
    train(on_ipus(0, 1), 3)
    with pytest.raises(poptorch.Error, match=r"\(3\)"):
        train(on_ipus(0, 1), 2)


def test_an_inference_pipeline_must_be_filled():
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater"):
        infer(on_ipus(0, 1, 2, 3), iterations=2)
    infer(on_ipus(0, 1, 2, 3), iterations=4)
    infer(on_ipus(0, 1, 2, 3), poptorch.ShardedExecution(), iterations=2)


def test_every_change_of_the_ipu_begins_a_section():
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    assert infer(on_ipus(0, 1, 2, 1), strategy, 4)._executable.timeline.sections == 4
    with pytest.raises(poptorch.Error, match=r"\(4\)"):
        infer(on_ipus(0, 1, 2, 1), strategy, 3)
    assert infer(on_ipus(0, 0, 1, 1), iterations=2)._executable.timeline.sections == 2


def test_a_first_block_on_another_ipu_is_the_second_section():
    assert infer(on_ipus(1), iterations=2)._executable.timeline.sections == 2


def test_a_stage_cannot_wait_for_a_later_one():
    with pytest.raises(
        poptorch.Error, match=r"stage 0, but it needs a result of block 'B1', which is stage 1"
    ) as caught:
        infer(on_ipus(0, 1, 0), iterations=3)
    assert "AutoIncrement" in str(caught.value)
    infer(on_ipus(0, 1, 0), poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement), 3)
    infer(on_ipus(0, 1, 0), poptorch.ShardedExecution())


class Tied(Blocks):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.layers[-1].weight = self.layers[0].weight


def test_a_pipeline_keeps_each_parameter_on_one_ipu():
    with pytest.raises(poptorch.Error, match=r"layers.0.weight is used on two IPUs(.|\n)*on the same graph") as caught:
        infer(Tied(("A", 0), ("B", 1)), iterations=2)
    assert "ipu 1 stage 1" in str(caught.value)
    auto = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    infer(Tied(("A", 0), ("B", 1), ("C", 0)), auto, 3)
    infer(Tied(("A", 0), ("B", 1)), poptorch.ShardedExecution())


def test_blocks_must_be_listed_if_any_is():
    with pytest.raises(AssertionError, match=r"Unknown Block 'B1'(.|\n)*options: +PipelinedExecution"):
        infer(on_ipus(0, 1), poptorch.PipelinedExecution("B0", "B2"), 2)


def test_a_block_needs_an_ipu_if_that_is_its_stage():
    with pytest.raises(AssertionError, match="SameAsIpu"):
        infer(on_ipus(None))


def test_the_ipu_of_a_stage_wins_over_that_of_a_block():
    strategy = poptorch.PipelinedExecution("B0", "B1")
    strategy.stage("B1").ipu(3)
    timeline = infer(on_ipus(0, 1), strategy, 2)._executable.timeline
    assert timeline.ipus == (0, 3)


def test_ipus_come_in_powers_of_two_if_hardware_is_asked_for():
    with pytest.raises(poptorch.Error, match=r"use of 3 IPUs.*minimum of 4(.|\n)*autoRoundNumIPUs\(True\)"):
        infer(on_ipus(0, 1, 2), iterations=3, useIpuModel=False)
    infer(on_ipus(0, 1, 2), iterations=3, useIpuModel=False, autoRoundNumIPUs=True)
    infer(on_ipus(0, 1, 2), iterations=3, useIpuModel=True)


def test_a_process_has_64_ipus():
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(128\)"):
        infer(on_ipus(0, 1), iterations=2, replicationFactor=64, connectionType=poptorch.ConnectionType.OnDemand)


def test_every_replica_has_its_own_ipus():
    assert infer(on_ipus(0, 1), iterations=2, replicationFactor=2)._executable.ipus == 4


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def log_of(caplog, model, strategy=None, iterations=1):
    poptorch.setLogLevel("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG):
            infer(model, strategy, iterations)
    finally:
        poptorch.setLogLevel("WARN")
    return lines(caplog)


def test_the_log_tells_where_tensors_are_computed(caplog):
    log = log_of(caplog, on_ipus(0, 1), iterations=2)
    assert "enablePipelining set to value 1" in log
    assert "layers/0/MatMul:0 mode(Pipelined), ipu(0), stage(0)" in log
    assert "layers/1/MatMul:0 mode(Pipelined), ipu(1), stage(1)" in log


@pytest.mark.parametrize(
    ("liveness", "phases", "setting"),
    [
        (poptorch.Liveness.AlwaysLive, (0, 1, 2), 3),
        (poptorch.Liveness.OffChipAfterFwd, (0, 1, 2), 6),
        (poptorch.Liveness.OffChipAfterFwdNoOverlap, (0, 2, 4), 8),
        (poptorch.Liveness.OffChipAfterEachPhase, (0, 4, 8), 12),
    ],
)
def test_phases_are_numbered_with_room_for_moving_tensors(caplog, liveness, phases, setting):
    strategy = poptorch.SerialPhasedExecution("B0", "B1", "B2").setTensorsLiveness(liveness)
    log = log_of(caplog, on_ipus(0, 0, 0), strategy)
    assert f"executionPhaseSettings.phases set to value {setting}" in log
    assert "executionPhaseSettings.stages set to value 1" in log
    for number, phase in enumerate(phases):
        assert f"layers/{number}/MatMul:0 mode(Phased), ipu(0), phase({phase})" in log


def test_a_separate_backward_phase_counts(caplog):
    strategy = poptorch.SerialPhasedExecution("B0", "B1", "B2").useSeparateBackwardPhase()
    assert "executionPhaseSettings.phases set to value 4" in log_of(caplog, on_ipus(0, 0, 0), strategy)


def parallel(*ipus):
    strategy = poptorch.ParallelPhasedExecution(
        [poptorch.Stage("B0"), poptorch.Stage("B1")], [poptorch.Stage("B2"), poptorch.Stage("B3")]
    )
    strategy.phase(0).ipus(*ipus[:2])
    strategy.phase(1).ipus(*ipus[2:])
    return strategy


def test_parallel_phases_alternate_between_even_and_odd_ipus(caplog):
    log = log_of(caplog, on_ipus(None, None, None, None), parallel(0, 2, 1, 3))
    assert "executionPhaseSettings.stages set to value 2" in log
    assert "enablePipelining set to value 0" in log
    assert "layers/3/MatMul:0 mode(Phased), ipu(3), phase(1)" in log
    assert "location_weight set to value useOnChipStorage(False)" in log


def test_an_odd_phase_on_an_even_ipu_is_refused():
    with pytest.raises(poptorch.Error, match="even phases run on even"):
        infer(on_ipus(None, None, None, None), parallel(0, 2, 1, 4))


def test_an_emulated_system_only_warns_of_other_numbers_of_ipus(caplog):
    warn_once.cache_clear()
    infer(on_ipus(0, 1, 2), iterations=3)
    found = [record for record in caplog.records if "use of 3 IPUs" in record.getMessage()]
    assert [record.levelname for record in found] == ["WARNING"]
    assert "autoRoundNumIPUs(True)" in found[0].getMessage()


def test_rounding_the_number_of_ipus_is_a_warning(caplog):
    warn_once.cache_clear()
    infer(on_ipus(0, 1, 2), iterations=3, useIpuModel=False, autoRoundNumIPUs=True)
    assert any("use of 3 IPUs" in line and "minimum of 4" in line for line in lines(caplog))


class Products(nn.Module):
    """Matrix products in phases on two groups of IPUs: one on each IPU in even phases, two in odd ones."""

    def __init__(self, repeats):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(10, 10)) for _ in range(6 * repeats))
        self.repeats = repeats

    def block(self, phase, group):
        ipu = phase % 2 + 2 * group
        return poptorch.Block(f"phase{phase}_ipu{ipu}", ipu_id=ipu)

    def forward(self, x):
        weights, values = iter(self.weights), [x[:10], x[10:]]
        with self.block(0, 0):
            values[0] = values[0] * 1
        with self.block(0, 1):
            values[1] = values[1] * 1
        for phase in [p for n in range(self.repeats) for p in (2 * n, 2 * n + 1, 2 * n + 1)]:
            for group in range(2):
                with self.block(phase, group):
                    values[group] = next(weights) @ values[group]
        with self.block(2 * self.repeats - 1, 1):
            return poptorch.identity_loss(values[0] + values[1], "sum")


def by_stages(repeats):
    names = [[f"phase{p}_ipu{p % 2}", f"phase{p}_ipu{p % 2 + 2}"] for p in range(2 * repeats)]
    return poptorch.ParallelPhasedExecution(*(poptorch.Phase(*map(poptorch.Stage, pair)) for pair in names))


def by_stages_with_ipus(repeats):
    strategy = by_stages(repeats)
    for phase in range(2 * repeats):
        strategy.phase(phase).ipus(phase % 2, phase % 2 + 2)
    return strategy


def by_text(repeats):
    return poptorch.ParallelPhasedExecution(
        *([f"phase{p}_ipu{p % 2}", f"phase{p}_ipu{p % 2 + 2}"] for p in range(2 * repeats))
    )


@pytest.mark.parametrize("strategy", [by_text, by_stages, by_stages_with_ipus])
@pytest.mark.parametrize("repeats", [1, 3])
def test_parallel_phases_are_logged_with_their_ipus(caplog, strategy, repeats):
    poptorch.setLogLevel("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG):
            options = poptorch.Options().setExecutionStrategy(strategy(repeats))
            model = Products(repeats)
            training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
            training.compile(torch.ones(20, 1))
    finally:
        poptorch.setLogLevel("WARN")
    log = lines(caplog)
    assert "executionPhaseSettings.stages set to value 2" in log
    assert f"executionPhaseSettings.phases set to value {2 * repeats}" in log
    assert "enablePipelining set to value 0" in log
    for kind in ("activation", "weight", "optimizer", "accumulator"):
        assert f"location_{kind} set to value useOnChipStorage(False)" in log
    products = [line.partition("mode(Phased), ")[2] for line in log if line.startswith("MatMul")]
    phases = [p for n in range(repeats) for p in (2 * n, 2 * n + 1, 2 * n + 1)]
    assert products == [f"ipu({p % 2 + 2 * group}), phase({p})" for p in phases for group in range(2)]
    assert f"Sum:0 mode(Phased), ipu(3), phase({2 * repeats - 1})" in log  # the loss
