"""Processes that share out the rows of the optimiser's state train as those that have all of it."""

from __future__ import annotations

import pytest
import torch

from company import Company
from process_cases import Case, checkpoint, explain_rows, memory_of_state, train, train_all

OPTIMIZERS = {
    "SGD": (("lr", 0.1), ("momentum", 0.9), ("dampening", 0.1)),
    "AdamW": (("lr", 0.01), ("amsgrad", True)),
    "Adagrad": (("lr", 0.01),),  # of which the step is captured
    "NAdam": (("lr", 0.01),),
    "Rprop": (("lr", 0.01),),
}
BY_NORMS = {"LAMB": (("lr", 0.01),), "Adam": (("lr", 0.01),)}  # the sums of norms are in another order


@pytest.fixture(scope="module", params=[2, 3])
def company(request):
    started = Company(request.param, POPTORCH_TIMEOUT="30")
    yield started
    started.close()


def compare(company, cases, check):
    """Weights and optimiser state of all processes, and those of one process that does the same."""
    found = company.run(train_all, cases)
    for number, case in enumerate(cases):
        expected = train(case, processes=len(company.members))
        for rank, results in enumerate(found):
            result = results[number]
            assert result["has_rows"]
            assert not expected["has_rows"]
            assert result["optimizer"].keys() == expected["optimizer"].keys()
            own = {name: value for name, value in result["state"].items() if rank == 0 or "running" not in name}
            for name, value in (own | result["optimizer"]).items():
                wanted = expected["state"].get(name, expected["optimizer"].get(name))
                check(value, wanted, f"{case} {name} of process {rank}")


def test_in_order_they_are_bit_for_bit_those_of_one_process(company):
    sizes = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 1)]
    cases = [Case(*each, *size, sharded=True) for each, size in zip(OPTIMIZERS.items(), sizes, strict=True)]

    def check(value, wanted, text):
        assert torch.equal(value, wanted), text

    compare(company, cases, check)


def test_sums_and_norms_are_the_same_up_to_rounding(company):
    every = {**BY_NORMS, "AdamW": OPTIMIZERS["AdamW"]}.items()
    cases = [Case(*each, in_order=False, sharded=True, clip_norm=0.5, wide=True, accumulation=2) for each in every]
    cases += [Case("Adam", BY_NORMS["Adam"], 2, half=True, in_order=False, sharded=True, clip_norm=1.0)]

    def check(value, wanted, text):
        tolerance = 1e-3 if value.dtype is torch.float16 else 1e-5
        torch.testing.assert_close(value, wanted, rtol=100 * tolerance, atol=tolerance, msg=text)

    compare(company, cases, check)


@pytest.mark.long
def test_native_code_updates_rows():
    company = Company(2, POPTORCH_TIMEOUT="60")
    case = Case("LAMB", BY_NORMS["LAMB"], in_order=False, sharded=True, clip_norm=0.5, engine="inductor")
    (found, *_) = company.run(train_all, [case])
    company.close()
    expected = train(case, processes=2)
    for name, value in expected["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_each_process_has_memory_for_its_rows(company):
    count = len(company.members)
    whole = 2 * 4 * 60 * 40  # Adam has two numbers for each of the weight
    for shown, kept, step in company.run(memory_of_state):
        assert (shown, kept) == ("meta", whole // count)
        assert step == 1


def test_a_checkpoint_has_all_rows_and_another_number_of_processes_goes_on_with_it(company, tmp_path):
    alone = company.run(checkpoint, tmp_path / "none", 6, 6)
    company.run(checkpoint, tmp_path / "some", 3, 6)
    resumed = company.run(checkpoint, tmp_path / "some", 6, 6)
    for before, after in zip(alone, resumed, strict=True):
        assert after["progress"] == {"step": 3}
        for name, value in before["state"].items():
            assert torch.equal(value, after["state"][name]), name
    one = Company(1, WORLD_SIZE="1")
    (single,) = one.run(checkpoint, tmp_path / "some", 3, 6)
    one.close()
    assert single["progress"] == {"step": 6}
    assert torch.equal(single["state"]["layers.0.weight"], resumed[0]["state"]["layers.0.weight"])
    for name, value in resumed[0]["optimizer"].items():
        assert torch.equal(value, single["optimizer"][name]), name


def test_state_without_its_rows_is_refused(company):
    for text in company.run(explain_rows):
        assert "the optimiser has no values of exp_avg for parameter layers.0.weight" in text[0]
        assert "copyWeightsToHost() in all processes" in text[0]
        assert "each process updates some rows of large parameters, which one file cannot hold" in text[1]
