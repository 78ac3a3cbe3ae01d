"""Inference through poptorch gives what `module.eval()` gives in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import poptorch
from oracle.eager_reference import EagerReference, assert_same, map_tensors, split
from oracle.test_training_matches_eager import EVERYTHING, SEED, TOLERANCE, arguments, options_for, state_of
from oracle.zoo import Case, all_cases, find

# The specified warning for a result that is a constant of the host; the case PlainTensorAttribute returns one.
pytestmark = pytest.mark.filterwarnings("ignore:Output expected to be on the IPU")

CALLS = 3
ALL_SHAPES = [(1, 1, "All"), (3, 2, "EveryN"), (3, 1, "Sum"), (1, 2, "Final")]
SHAPES = ALL_SHAPES if EVERYTHING else [(3, 2, "EveryN")]  # cuts batches, replicas and outputs at once


def infer_both(case: Case, engine: str, d: int, r: int, mode: str) -> None:
    module, twin = case.build().eval(), case.build().eval()
    period = 3 if mode == "EveryN" else None
    options = options_for(engine, d, 1, r).outputMode(poptorch.OutputMode[mode], period)
    inference = poptorch.inferenceModel(module, options)
    reference = EagerReference(twin, device_iterations=d, replicas=r, seed=SEED, mode=mode, period=period or 1)
    generator, how = torch.Generator().manual_seed(1), TOLERANCE[engine]
    before = map_tensors(torch.clone, state_of(module))
    for call in range(CALLS):
        args, kwargs = arguments(case, generator, d * r)
        their_args, their_kwargs = map_tensors(torch.clone, (args, kwargs))
        result = inference(*args, **kwargs)
        assert_same(result, reference(*their_args, **their_kwargs), **how, where=f"result of call {call}")
        assert_same((args, kwargs), (their_args, their_kwargs), **how, where=f"arguments after call {call}")
    assert_same(state_of(module), before, rtol=0.0, atol=0.0, where="state before copyWeightsToHost")
    inference.copyWeightsToHost()
    assert_same(state_of(module), state_of(twin), **how, where="state")


@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize(("d", "r", "mode"), SHAPES)
def test_inference_matches_eager(case: Case, d: int, r: int, mode: str, engine: str) -> None:
    infer_both(case, engine, d, r, mode)


@pytest.mark.parametrize("mode", ["All", "Final", "EveryN", "Sum"])
@pytest.mark.parametrize("d", [3, 6])
@pytest.mark.parametrize("r", [1, 2])
def test_every_output_mode(mode: str, d: int, r: int, engine: str) -> None:
    infer_both(*find("SortAndTopk"), engine, d, r, mode)
    infer_both(*find("FloatBufferInPlace"), engine, d, r, mode)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["BatchNorm2d", "FloatBufferInPlace", "SortAndTopk"])
def test_native_code_infers_like_eager(name: str, engine: str) -> None:
    infer_both(*find(name), engine, 3, 2, "All")


def test_inference_sees_what_training_has_learnt(engine: str) -> None:
    (case,) = find("BatchNorm1d")
    module = case.build()
    training = poptorch.trainingModel(module, options_for(engine, 1, 1, 1), case.optimizer(module))
    generator = torch.Generator().manual_seed(1)
    args, kwargs = case.batch(generator)
    inference = poptorch.inferenceModel(case.build().eval(), options_for(engine, 1, 1, 1))
    inference(*args, **kwargs)
    for _ in range(3):
        module.train()
        training(*case.batch(generator)[0])
        module.eval()
        learnt = poptorch.inferenceModel(module, options_for(engine, 1, 1, 1))
        with torch.no_grad():
            assert_same(learnt(*args, **kwargs), module(*args, **kwargs), **TOLERANCE[engine])


def test_one_inference_model_follows_the_training_of_the_same_module(engine: str) -> None:
    (case,) = find("Mlp")
    module = case.build()
    training = poptorch.trainingModel(module, options_for(engine, 1, 1, 1), case.optimizer(module))
    inference = poptorch.inferenceModel(module, options_for(engine, 2, 1, 1))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        training(*case.batch(generator)[0])
        args, _ = arguments(case, generator, 2)
        out, _ = inference(*args)
        with torch.no_grad():
            expected = torch.cat([module(*part[0])[0] for part in split((args, {}), 2)])
        assert_same(out, expected, **TOLERANCE[engine])
