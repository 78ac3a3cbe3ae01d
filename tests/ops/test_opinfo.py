"""PyTorch's own samples of its operations give through poptorch what they give in eager PyTorch.

They run in programs of their own: PyTorch's testing package changes settings of the process that imports it.
"""

from __future__ import annotations

import json
import re

import pytest

PARTS = 24

# What a compiled program does not have, and how it is refused.
REFUSED = {
    "istft": "complex64, which a device does not have",
    "imag": "complex64, which a device does not have",
    "view_as_real": "complex64, which a device does not have",
    "nn_functional_silu_complex": "complex64, which a device does not have",
    "torch__scaled_mm": "float8_.*, which a device does not have",
    "torch__scaled_mm_v2": "float8_.*, which a device does not have",
    "to_sparse": "a gradient would have to pass through a sparse tensor",
    "sparse_mm_reduce": "sparse_csr tensor, (but|and) a compiled program",
    "sparse_sampled_addmm": "sparse(_csr| \\(torch.sparse_csr\\)) tensor.*, (but|and) a compiled program",
}


def run_samples(programs, *arguments: str, seconds: int, parts: int = 3) -> None:
    """Run samples, and fail with every one that is wrong or refused for another reason than those above."""
    program = programs.run(f"from ops.opinfo import main; main({list(arguments)})", seconds)
    lines = program.output.splitlines()
    failures = [json.loads(line) for line in lines if line.startswith("{")]
    unexpected = [f"{f['op']} {f['index']} {f['part']}: {f['detail']}" for f in failures if not is_refused(f)]
    assert not unexpected, "\n".join(unexpected)
    shares = [line for line in lines if re.match(r"(forward|backward|in place): [1-9]\d* of ", line)]
    assert len(shares) == parts, lines


def is_refused(failure: dict[str, str]) -> bool:
    return failure["status"] == "refused" and bool(re.search(REFUSED.get(failure["op"], "^$"), failure["detail"]))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_sample_of_every_eighth_operation(programs):
    run_samples(programs, "--most", "1", "--every", "8", "--first", "2", seconds=500)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_samples(programs, part, request):
    if not request.config.getoption("--long"):
        pytest.skip("takes an hour: --long runs it")
    run_samples(programs, "--most", "40", "--every", str(PARTS), "--first", str(part), seconds=800)


@pytest.mark.long
@pytest.mark.timeout(1700)
@pytest.mark.parametrize("part", range(PARTS))
def test_one_sample_of_every_operation_as_native_code(programs, part, request):
    if not request.config.getoption("--long"):
        pytest.skip("takes half an hour: --long runs it")
    which = ("--most", "1", "--every", str(PARTS), "--first", str(part), "--engine", "inductor")
    run_samples(programs, *which, "--together", "24", "--parts", "forward", seconds=800, parts=1)
    run_samples(programs, *which, "--parts", "backward,in place", seconds=800, parts=2)
