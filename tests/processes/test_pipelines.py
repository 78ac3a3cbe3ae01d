"""Processes that have the stages of one model train it as one process does, bit for bit."""

from __future__ import annotations

import pytest
import torch

import pipeline_cases
from company import Company, Raised
from pipeline_cases import Case

CASES = [
    Case(clip_norm=0.1, recomputation=0),
    Case("Convolutions", optimizer="Adam", iterations=2, meta=True),
    Case("Encoder", optimizer="AdamW", clip_norm=0.1, recomputation=0),
    Case("Skips", "sharded", optimizer="RMSprop", reduction="Running"),
    Case("TiedEmbedding", replicas=2),
    Case(half=True, optimizer="Adam", seed=None),
    Case("Mlp", "parallel phases", reduction="Running", replicas=2, clip_norm=0.01),
]


@pytest.fixture(scope="module", params=[2, 3])
def company(request):
    started = Company(request.param, POPTORCH_TIMEOUT="60")
    yield started
    started.close()


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {case.strategy} {case.optimizer}")
def test_outputs_weights_and_optimiser_state_are_those_of_one_process(company, case, request):
    is_long = case.model == "Encoder" or (len(company.members) > 2 and case.model != "TiedEmbedding")
    if is_long and not request.config.getoption("--long"):
        pytest.skip("takes long")
    if case.strategy == "parallel phases" and len(company.members) > 2:
        pytest.skip("two IPUs")
    expected = pipeline_cases.train(case, is_whole=True)
    results = company.run(pipeline_cases.train, case)
    for result in results:
        for outputs, wanted in zip(result["outputs"], expected["outputs"], strict=True):
            assert all(map(torch.equal, outputs, wanted))
        check_same(result["all"], expected["all"])
        assert result["random"] == expected["random"]
    for kind in ("own", "state"):  # every process has a part of it, and no two have the same
        parts = [result[kind] for result in results]
        assert sum(map(len, parts)) == len(expected[kind])
        check_same({name: value for part in parts for name, value in part.items()}, expected[kind])


def test_inference_gives_all_processes_the_outputs(company):
    for found, expected in company.run(pipeline_cases.infer, Case("Convolutions")):
        torch.testing.assert_close(found, expected)


def test_copies_of_the_weights_of_others_last_until_the_model_trains_on(company):
    case = Case(optimizer="Adam")
    expected = pipeline_cases.train(case, is_whole=True)
    for here, known, away, fewer, copied, state in company.run(pipeline_cases.go_on_after_copying, case):
        assert here == expected["all"].keys()
        assert (known, copied) == (8, True)
        assert 0 < len(away) == 8 - fewer  # a name of a weight or bias, and an entry of the optimiser for it
        check_same(state, expected["all"])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_that_one_process_cannot_take_fails_in_all_and_changes_nothing(company, failing):
    if len(company.members) != 2:
        pytest.skip("two IPUs")
    outputs, state = pipeline_cases.train_twice()
    for index, (raised, found, own) in enumerate(company.run(pipeline_cases.fail_and_go_on, failing)):
        kind, text = raised
        assert kind == ("ProcessError" if index != failing else "ArgumentError")
        assert index == failing or f"process {failing} of 2" in text
        assert all(map(torch.equal, found, outputs))
        check_same(own, state)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tied", "model.table.weight changes, and stages in processes"),
        ("one IPU", "is on 1 IPU(s), which cannot be spread over"),
    ],
)
def test_what_cannot_be_spread_is_refused(company, kind, text):
    company.start(pipeline_cases.refuse, kind, len(company.members))
    for result in company.results():
        assert isinstance(result, Raised)
        assert text in result.text


SPREAD = [
    Case(clip_norm=0.1, optimizer="Adam", per_replica=2),
    Case("Skips", "sharded", optimizer="RMSprop", reduction="Running", replicas=2, per_replica=2),
    Case("Convolutions", iterations=2, meta=True, per_replica=2),
]


@pytest.fixture(scope="module")
def four():
    started = Company(4, POPTORCH_TIMEOUT="60")
    yield started
    started.close()


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: f"{case.model} {case.strategy}")
def test_replicas_may_be_spread_over_further_processes(four, case):
    expected = pipeline_cases.train_spread(case, companies=2)
    for rank, found in enumerate(four.run(pipeline_cases.train_spread, case)):
        assert found["state"].keys() == expected["state"].keys()
        own = {name: value for name, value in found["weights"].items() if rank < 2 or "running" not in name}
        for name, value in (own | found["state"]).items():
            wanted = expected["weights"].get(name, expected["state"].get(name))
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=f"{name} of process {rank}")
        every = expected["losses"][0].view(-1, 2, case.replicas)
        torch.testing.assert_close(found["losses"][0], every[:, rank // 2].flatten())


@pytest.mark.parametrize("failing", [0, 3])
def test_a_call_that_one_of_them_cannot_take_fails_in_all_and_they_go_on(four, failing):
    results = four.run(pipeline_cases.fail_spread, failing)
    for rank, (raised, weights) in enumerate(results):
        ((number, kind, text),) = raised
        assert (number, kind) == (1, "ArgumentError" if rank == failing else "ProcessError")
        assert rank == failing or f"process {failing} of 4 has raised ArgumentError" in text
        check_same(weights, results[0][1])


def test_each_process_writes_its_stages_to_a_checkpoint_and_goes_on_from_there(four, tmp_path):
    case = Case("Convolutions", optimizer="Adam", accumulation=7, per_replica=2)
    expected = four.run(pipeline_cases.checkpoint, case, tmp_path / "undisturbed", 4)
    four.run(pipeline_cases.checkpoint, case, tmp_path / "stopped", 2)
    for found, wanted in zip(four.run(pipeline_cases.checkpoint, case, tmp_path / "stopped", 4), expected, strict=True):
        check_same(found[0], wanted[0])
        check_same(found[1], wanted[1])


def test_a_model_that_is_too_large_for_each_process_trains():
    company = Company(2, POPTORCH_TIMEOUT="60")
    try:
        company.run(pipeline_cases.train_with_limit, 8, 2**32, is_whole=False)  # what is only needed once
        company.start(pipeline_cases.train_with_limit, 2500, 500 * 2**20, is_whole=True)
        for result in company.results():
            assert isinstance(result, Raised)
            assert "can't allocate memory" in result.text
        company.start(pipeline_cases.train_with_limit, 2500, 500 * 2**20, is_whole=False)
        losses = [None if isinstance(result, Raised) or result is None else result[0] for result in company.results()]
        assert losses[0] is not None
        assert losses[0] == losses[1]
    finally:
        company.close()


def test_a_process_that_dies_ends_the_others():
    company = Company(2, POPTORCH_TIMEOUT="20")
    try:
        company.start(pipeline_cases.train_until_killed)
        survivor, dead = company.results(60)
        assert dead is None
        assert isinstance(survivor, Raised)
        assert "process 1 of 2 has died or cannot be reached" in survivor.text
    finally:
        company.close()
