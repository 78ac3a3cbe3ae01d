"""A process that fails ends the others soon, and with an error that says who it was and where."""

from __future__ import annotations

import random
import socket

import pytest
import torch

from company import Company, Raised
from process_cases import (
    agree_and_leave,
    compile_differently,
    compile_on_all_but,
    contradict_once,
    fail_and_leave,
    lookups,
    raise_once,
    raise_then,
    save_on_all_but,
    stall_then_go_on,
    train_until,
)

SECONDS = 3  # that processes wait for each other


@pytest.fixture(scope="module")
def company():
    started = Company(4, POPTORCH_TIMEOUT=str(SECONDS))
    yield started
    started.close()


def test_what_one_process_raises_ends_the_call_of_all_and_training_goes_on(company):
    found = company.run(raise_once, 2)
    for rank, (texts, _) in enumerate(found):
        (text,) = texts
        kind = "IndexRangeError" if rank == 2 else "ProcessError"
        assert text.startswith(f"{kind} in step 1:")
        assert rank == 2 or "process 2 of 4 has raised IndexRangeError" in text
        assert rank == 2 or socket.gethostname() in text
    module, _ = lookups()
    with torch.no_grad():  # two steps: the gradients of four processes, on average
        for _ in range(2):
            counts = torch.tensor([5.0, 1, 1, 1, 0, 0, 0, 0])
            module.table.weight -= 0.1 * 2 * module.table.weight * counts[:, None] / 4
    for _, weight in found:
        torch.testing.assert_close(weight, module.table.weight.detach())
        assert torch.equal(weight, found[0][1])


def test_a_value_that_one_process_contradicts_ends_the_call_of_all_and_training_goes_on(company):
    found = company.run(contradict_once, 3)
    expected = torch.tensor([[-0.1 * 2 * (1 + 3)] * 2])  # of the first step and the third
    for rank, (texts, weight) in enumerate(found):
        (text,) = texts
        assert text.startswith(f"{'GuardError' if rank == 3 else 'ProcessError'} in step 1:")
        assert rank == 3 or "process 3 of 4 has raised GuardError" in text
        assert torch.equal(weight, found[0][1])
    torch.manual_seed(1)
    torch.testing.assert_close(found[0][1], torch.nn.Linear(2, 1).weight.detach() + expected)


def test_what_one_process_raises_while_saving_is_raised_by_all_and_the_last_checkpoint_stays(company, tmp_path):
    for rank, (texts, progress) in enumerate(company.run(save_on_all_but, 1, tmp_path)):
        full, last_progress, loaded = texts[0], texts[1], texts[2]
        assert "No space left on device" in full
        assert last_progress.startswith("TypeError" if rank == 1 else "ProcessError")
        assert rank == 1 or "process 1 of 4 failed while saving a checkpoint: TypeError" in last_progress
        assert (loaded, progress) == (1, 4)


def test_what_one_process_raises_while_compiling_is_raised_by_all(company):
    company.start(compile_on_all_but, 1)
    found = company.results()
    assert all(isinstance(result, Raised) for result in found)
    assert found[1].kind != "ProcessError"
    for rank in (0, 2, 3):
        assert found[rank].kind == "ProcessError"
        assert "process 1 of 4 failed while compiling the model: " in found[rank].text
        assert found[1].text.splitlines()[0][-20:] in found[rank].text


def test_processes_with_different_programs_do_not_train_together(company):
    company.start(compile_differently)
    for result in company.results():
        assert isinstance(result, Raised)
        assert "process 1 of 4 failed while compiling the model: it has made another program" in result.text


def test_a_process_that_stalls_is_named_with_its_line():
    company = Company(3, POPTORCH_TIMEOUT=str(SECONDS))
    company.start(train_until, 1, 2, "stalls", seconds=3 * SECONDS)
    for rank, result in enumerate(company.results()):
        if rank != 1:
            step, text, seconds, is_unchanged = result
            assert (step, is_unchanged) == (2, True)
            assert text.startswith("ProcessError: process 1 of 3 did not take part in an exchange within 3 s")
            assert "process_cases.py" in text
            assert "time.sleep(seconds)  # the line at which it stalls" in text
            assert seconds < 4 * SECONDS
    company.close()


def test_a_process_that_comes_too_late_learns_why_the_others_are_gone():
    company = Company(2, POPTORCH_TIMEOUT="1")
    company.start(stall_then_go_on, 6)
    first, late = company.results()
    company.close()
    assert first.startswith("process 1 of 2 did not take part in an exchange within 1 s")
    assert late.startswith("process 0 of 2 has given up, like all others: this process kept them waiting")


def test_the_first_process_ends_after_the_others_know_what_was_agreed_on():
    company = Company(3, POPTORCH_TIMEOUT=str(SECONDS))
    company.start(agree_and_leave, 0.5)
    found = company.results()
    company.close()
    assert found == [None, "agreed", "agreed"]


def test_the_first_process_ends_after_the_others_know_who_failed():
    company = Company(3, POPTORCH_TIMEOUT=str(SECONDS))
    company.start(fail_and_leave, 0.5)
    *_, last = company.results()
    company.close()
    assert last.startswith("process 1 of 3 has died or cannot be reached")


def test_an_error_that_is_over_is_not_blamed_for_a_later_one():
    company = Company(3, POPTORCH_TIMEOUT=str(SECONDS))
    company.start(raise_then, 0, 2)
    first, second, dead = company.results()
    company.close()
    assert dead is None
    for texts, before in ((first, "IndexRangeError"), (second, "process 0 of 3 has raised IndexRangeError")):
        assert len(texts) == 2
        assert before in texts[0] or "argument index leads to" in texts[0]
        assert texts[1].startswith("process 2 of 3 has died or cannot be reached")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_process_that_dies_ends_the_others(request):
    """At a random step, 3 times or with --long 100 times; the limit for the others is that of the slowest wait."""
    chance = random.Random(0)
    for turn in range(100 if request.config.getoption("--long") else 3):
        rank, step = turn % 4, chance.randrange(1, 6)
        company = Company(4, POPTORCH_TIMEOUT=str(SECONDS))
        company.start(train_until, rank, step, "dies")
        found = company.results()
        company.close()
        assert found[rank] is None
        for result in found[:rank] + found[rank + 1 :]:
            at, text, seconds, is_unchanged = result
            assert (at, is_unchanged) == (step, True)
            assert text.startswith(f"ProcessError: process {rank} of ")
            assert "has died or cannot be reached" in text
            assert socket.gethostname() in text
            assert seconds < 4 * SECONDS
