"""An interrupt at any moment leaves the state of the last finished update, and the next call is exact."""

from __future__ import annotations

import pytest

CASES = [
    ("eager", optimiser, body, accumulation)
    for optimiser in ("sgd", "adam")
    for body in ("plain", "batch_norm", "dropout")
    for accumulation in (1, 8)
]
NATIVE = [("inductor", *case[1:]) for case in CASES]
NATIVE_IN_EVERY_RUN = [("inductor", "adam", "batch_norm", 8), ("inductor", "sgd", "dropout", 1)]
EAGER_IN_EVERY_RUN = [  # every two values meet
    ("eager", "sgd", "plain", 8),
    ("eager", "sgd", "batch_norm", 1),
    ("eager", "sgd", "dropout", 8),
    ("eager", "adam", "plain", 1),
    ("eager", "adam", "batch_norm", 8),
    ("eager", "adam", "dropout", 1),
]


def interrupt(programs, case: tuple[str, str, str, int], interrupts: int) -> None:
    code = f"from runtime.interrupted import main; main(*{case}, interrupts={interrupts}, seed=1)"
    assert f"{interrupts} interrupts" in programs.run(code, seconds=600).output


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_never_torn(case, programs, request):
    is_long = request.config.getoption("--long")
    if not is_long and case not in EAGER_IN_EVERY_RUN:
        pytest.skip("runs with --long")
    interrupt(programs, case, interrupts=200 if is_long else 10)


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", NATIVE, ids=str)
def test_native_training_is_never_torn(case, programs, request):
    is_long = request.config.getoption("--long")
    if not is_long and case not in NATIVE_IN_EVERY_RUN:
        pytest.skip("compiles for seconds; runs with --long")
    interrupt(programs, case, interrupts=200 if is_long else 25)
