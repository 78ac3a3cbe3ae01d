"""A model in stages computes what it computes without: outputs, weights, buffers and optimiser state, bit for bit."""

from __future__ import annotations

import pytest
import torch

import poptorch
from staged_models import MODELS, STRATEGIES, Convolutions, Mlp, Training, options_for


def unannotated(function):
    """Run without blocks: `Block.start` outside of a capture does nothing, and one stage holds all of them."""
    return function(poptorch.PipelinedExecution(poptorch.Stage("A", "B", "C", "D").ipu(0)), stages=False)


def trained(kind, strategy, *, stages, optimizer=torch.optim.SGD, recomputation=None, replicas=1):
    torch.manual_seed(0)
    model = Training(kind())
    options = options_for(strategy, stages, replicas).deviceIterations(2)
    options.Training.gradientAccumulation(7)
    if recomputation is not None:
        options._Popart.set("autoRecomputation", recomputation)
    chosen = optimizer(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options, chosen)
    rows = 2 * 7 * 2 * replicas
    torch.manual_seed(1)
    outputs = [training(torch.randn(rows, *kind.shape), torch.randn(rows, 6)) for _ in range(2)]
    state = [tensor for entry in chosen.state_dict()["state"].values() for tensor in entry.values()]
    return [*(tensor for pair in outputs for tensor in pair), *model.state_dict().values(), *state], training


def check_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training_in_stages_is_training_of_the_whole(kind, strategy):
    expected, _ = unannotated(lambda *how, **more: trained(kind, *how, **more))
    found, training = trained(kind, STRATEGIES[strategy](), stages=True)
    assert training._executable.is_cut
    check_equal(found, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_inference_in_stages_is_inference_of_the_whole(kind, strategy):
    def run(strategy, *, stages):
        torch.manual_seed(0)
        model = kind().eval()
        options = options_for(strategy, stages).deviceIterations(4)
        torch.manual_seed(1)
        return poptorch.inferenceModel(model, options)(torch.randn(8, *kind.shape))

    assert torch.equal(run(STRATEGIES[strategy](), stages=True), unannotated(run))


@pytest.mark.parametrize("recomputation", [0, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_recomputation_and_optimisers_change_nothing(optimizer, recomputation):
    expected, _ = unannotated(lambda *how, **more: trained(Mlp, *how, optimizer=optimizer, **more))
    pipeline = STRATEGIES["pipelined"]()
    found, training = trained(Mlp, pipeline, stages=True, optimizer=optimizer, recomputation=recomputation)
    programs = [program.name for program in training._executable.programs]
    assert ("recompute0" in programs) == (recomputation > 0)
    check_equal(found, expected)


def test_replicas_of_a_pipeline_share_one_update():
    expected, _ = unannotated(lambda *how, **more: trained(Convolutions, *how, replicas=2, **more))
    found, _ = trained(Convolutions, STRATEGIES["pipelined"](), stages=True, replicas=2)
    check_equal(found, expected)


def test_each_section_updates_its_own_weights():
    _, training = trained(Mlp, STRATEGIES["pipelined"](), stages=True)
    names = [program.name for program in training._executable.programs]
    assert [name for name in names if name.startswith("update")] == ["update0", "update1", "update2", "update3"]


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [Mlp])
def test_stages_run_as_native_code(kind, engine):
    def run(strategy, *, stages):
        torch.manual_seed(0)
        model = Training(kind())
        options = options_for(strategy, stages).engine(engine)
        options.Training.gradientAccumulation(7)
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))
        torch.manual_seed(1)
        training(torch.randn(14, *kind.shape), torch.randn(14, 6))
        return list(model.state_dict().values())

    for a, b in zip(run(STRATEGIES["pipelined"](), stages=True), unannotated(run), strict=True):
        torch.testing.assert_close(a, b)
