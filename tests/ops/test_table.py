"""Every operation that programs for IPUs rely on gives what eager PyTorch gives, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ops.against_eager import Called, difference, run, run_eager, train, train_eager
from ops.table import ROWS_BY_NAME, SECTIONS, Row

pytestmark = pytest.mark.filterwarnings("ignore:(reduction. 'mean' divides|index_reduce|scatter_reduce)")  # of PyTorch


def assert_same(function: Any, arguments: tuple[Any, ...], engine: str) -> None:
    differs = difference(run(Called(function, arguments), engine), run_eager(Called(function, arguments)))
    assert not differs, differs
    expected = train_eager(Called(function, arguments, training=True))
    if expected is not None:
        differs = difference(train(Called(function, arguments, training=True), engine), expected)
        assert not differs, f"backward: {differs}"


@pytest.mark.parametrize("row", ROWS_BY_NAME.values(), ids=list(ROWS_BY_NAME))
def test_each_operation(row: Row) -> None:
    function, *arguments = row
    assert_same(function, tuple(arguments), "eager")


class Section(nn.Module):
    """Several rows in one model, which compiles faster than as many models."""

    def __init__(self, rows: dict[str, Row]) -> None:
        super().__init__()
        functions = [copy.deepcopy(function) for function, *_ in rows.values()]
        self.layers = nn.ModuleList(function for function in functions if isinstance(function, nn.Module))
        self.functions = functions

    def forward(self, *arguments: tuple[torch.Tensor, ...]) -> Any:
        return [function(*args) for function, args in zip(self.functions, arguments, strict=True)]


def assert_section(rows: dict[str, Row], engine: str) -> None:
    assert_same(Section(rows), tuple(tuple(arguments) for _, *arguments in rows.values()), engine)


SAMPLE = {
    name: ROWS_BY_NAME[name]
    for name in (
        "shaping: scatter_reduce, mean, without self",
        "pointwise: atan2",
        "reductions: logsumexp, a dimension",
        "comparisons: topk",
        "others: cdist",
        "layers: EmbeddingBag, max",
        "activations: Mish",
        "losses: PoissonNLLLoss, log, full",
    )
}


@pytest.mark.long
@pytest.mark.inductor
def test_a_sample_as_native_code(engine: str) -> None:
    assert_section(SAMPLE, engine)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("section", SECTIONS)
def test_all_operations_as_native_code(section: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("takes ten minutes: --long runs it")
    rows = list(SECTIONS[section].items())
    for first in range(0, len(rows), 16):
        assert_section(dict(rows[first : first + 16]), "inductor")
