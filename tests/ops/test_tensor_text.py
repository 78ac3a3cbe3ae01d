"""Tensors as text: layout, digits, summaries and line breaks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from poptorch.ops.tensor_text import FLOAT_FORMATS, TextFormat, tensor_text

SQUARE = {"open_bracket": "[", "close_bracket": "]"}


def text(values, **options):
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    return tensor_text("t", tensor, TextFormat(**options))


def test_a_vector_is_one_line():
    assert text([5, 7, 9], separator=" ", **SQUARE) == "t: [5 7 9]"


def test_integers_are_aligned():
    assert text([6, 9, 12], separator=" ", **SQUARE) == "t: [ 6  9 12]"


def test_integers_may_have_more_digits_than_asked_for():
    assert text([123456], digits=2) == "t: (123456)"


def test_a_single_value_has_no_brackets():
    assert text(1.5) == "t: 1.500"


def test_brackets_nest_and_indent():
    assert text(torch.arange(8).view(2, 2, 2)) == "\n".join(
        ["t: (", " (", "  (0,1)", "  (2,3)", " )", " (", "  (4,5)", "  (6,7)", " )", ")"]
    )


def test_no_elements():
    assert text(torch.empty(0)) == "t: ()"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"float_format": "fixed"}, "t: (  1.5,-20.2)"),
        ({"float_format": "scientific"}, "t: ( 1.50e+00,-2.02e+01)"),
        ({"float_format": "none"}, "t: (  1.5,-20.2)"),
        ({"digits": 0}, "t: (1.5,-20.25)"),
    ],
)
def test_formats_of_floats(options, expected):
    assert text([1.5, -20.25], **{"digits": 3, **options}) == expected


@pytest.mark.parametrize(("value", "expected"), [(123456.0, "t: (1.23e+05)"), (0.000012, "t: (1.20e-05)")])
def test_auto_writes_exponents_for_very_large_and_very_small_numbers(value, expected):
    assert text([value], digits=3) == expected


def test_what_is_not_finite_is_named():
    assert text([float("nan"), float("inf"), 1.0], digits=2) == "t: (nan,inf,1.0)"


def test_half_precision_and_booleans():
    assert text(torch.tensor([1.0], dtype=torch.float16), digits=2) == "t: (1.0)"
    assert text([True, False]) == "t: (1,0)"


def test_only_the_edges_of_large_tensors_are_shown():
    shown = text(torch.arange(100), summarise_threshold=99, edge_items=2)
    assert shown == "t: ( 0, 1,...,98,99)"
    rows = text(torch.arange(100).view(10, 10), summarise_threshold=99, edge_items=1)
    assert rows == "\n".join(["t: (", " ( 0,..., 9)", " ...", " (90,...,99)", ")"])
    assert "..." not in text(torch.arange(100), summarise_threshold=0)
    assert "..." not in text(torch.arange(100), summarise_threshold=100)


def test_long_lines_go_on_two_characters_further_in():
    assert text([1.0, 2.0], digits=2, max_line_width=8) == "t: (1.0,\n  2.0)"


@given(integers(1, 40), integers(1, 7), sampled_from(FLOAT_FORMATS), integers(12, 90))
def test_no_line_is_longer_than_the_limit_unless_it_is_one_number(size, digits, float_format, width):
    lines = text(torch.linspace(-3, 5, size), digits=digits, float_format=float_format, max_line_width=width)
    for line in lines.split("\n"):
        assert len(line) <= width or line.count(",") <= 1


def test_width_zero_never_breaks():
    assert "\n" not in text(torch.arange(500), max_line_width=0)
