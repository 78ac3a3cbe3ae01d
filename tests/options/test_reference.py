"""The documentation of options is made from their declarations."""

from __future__ import annotations

import pytest

from poptorch.options import reference
from poptorch.options.reference import GROUPS, rows


def test_every_option_is_listed_once_with_a_sentence():
    calls = [row.call for row in rows()]
    assert len(calls) == len(set(calls))
    assert all(row.sentence.endswith(".") for row in rows())
    text = reference()
    for prefix, group in GROUPS.items():
        for name in group._definitions:
            assert f"{prefix}{name}(" in text


@pytest.mark.parametrize("group", GROUPS.values())
def test_no_key_is_declared_twice(group):
    keys = [key for definition in group._definitions.values() for key in definition.stored]
    assert len(keys) == len(set(keys))
