"""P processes of R replicas train as one process of P × R replicas does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from company import Company
from process_cases import Case, train, train_all

OPTIMIZERS = {
    "SGD": (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.01)),
    "Adam": (("lr", 0.01),),
    "AdamW": (("lr", 0.01),),
    "RMSprop": (("lr", 0.01), ("momentum", 0.5)),
    "LAMB": (("lr", 0.01),),
    "Adagrad": (("lr", 0.01),),
}
SIZES = [(1, 1), (1, 2), (3, 1), (2, 2)]  # accumulation steps, and replicas of each process
MODES = [("Mean", "Post"), ("Mean", "Running"), ("Sum", "Post")]
CASES = [
    Case(name, arguments, *SIZES[index % 4], *MODES[index % 3], clip_norm=0.5 if index % 2 else None)
    for index, (name, arguments) in enumerate(OPTIMIZERS.items())
]
CASES += [Case("SGD", OPTIMIZERS["SGD"], *size, *MODES[1]) for size in SIZES]
CASES += [
    Case("SGD", OPTIMIZERS["SGD"], 2, 2, iterations=2),
    Case("SGD", OPTIMIZERS["SGD"], 2, 1, strategy="Running", half=True),
    Case("Adam", OPTIMIZERS["Adam"], 2, 1, half=True, clip_norm=1.0),
]  # with --long, all optimisers with all sizes and modes
ALL = [Case(*each, *size, *mode) for each in OPTIMIZERS.items() for size in SIZES for mode in MODES]


@pytest.fixture(scope="module", params=[2, 4])
def company(request):
    started = Company(request.param, POPTORCH_TIMEOUT="30")
    yield started
    started.close()


def test_weights_are_bit_for_bit_those_of_one_process_with_all_replicas(company, request):
    count = len(company.members)
    cases = ALL + CASES if request.config.getoption("--long") else CASES[:: 1 if count == 2 else 4]
    found = company.run(train_all, cases)
    for number, case in enumerate(cases):
        expected = train(case, processes=count)["state"]
        for name, value in expected.items():
            ranks = [torch.equal(value, results[number]["state"][name]) for results in found]
            assert ranks[0], (case, name)  # statistics are those of a replica, and the first replica is here
            assert all(ranks) or "running" in name, (case, name)


def test_sums_in_any_order_are_the_same_up_to_rounding(company):
    count = len(company.members)
    chosen = [case for case in CASES if not case.half][count // 4 :: 3]
    cases = [replace(case, in_order=False, wide=index % 2 == 0) for index, case in enumerate(chosen)]
    found = company.run(train_all, cases)
    for number, case in enumerate(cases):
        expected = train(case, processes=count)["state"]
        for name, value in expected.items():
            first, *others = [results[number]["state"][name] for results in found]
            torch.testing.assert_close(first, value, rtol=1e-4, atol=1e-5, msg=f"{case} {name}")
            same = [torch.equal(first, other) for other in others]
            assert all(same) or "running" in name, (case, name)
