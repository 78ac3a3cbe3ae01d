"""Calls of Python functions from programs: the text they are written in, and functions that are not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poptorch.errors import EngineError
from poptorch.ops import custom, host_functions
from poptorch.ops.attributes import checked
from poptorch.ops.custom import OpName
from poptorch.ops.host_call import Result, as_text, from_text, host_call

SCALARS = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.booleans(), st.none())
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(DATA)
def test_data_come_back_from_text_that_needs_no_escapes(data):
    text = as_text(data)
    assert text.isascii()
    assert not set(text) & {'"', "\\", "\n"}
    assert from_text(text) == data


def test_integers_and_floats_stay_apart():
    one, same = as_text({"a": 1}), as_text({"a": 1.0})
    assert one != same
    assert type(from_text(one)["a"]) is int
    assert type(from_text(same)["a"]) is float


def test_a_program_that_names_an_unknown_host_function_says_so():
    host_functions.register(abs, "is here")
    with pytest.raises(EngineError, match=r"host function 'is her', which this process does not have.*'is here'"):
        host_call(host_functions.KIND, ["is her", 0], [torch.ones(1)], [Result(torch.float32, (1,))])
    with pytest.raises(EngineError, match="number 4 of the host functions 'is here', and this process has 1"):
        host_call(host_functions.KIND, ["is here", 3], [torch.ones(1)], [Result(torch.float32, (1,))])


def test_a_program_that_names_an_unknown_custom_op_says_so():
    what = custom.call_of(OpName("com.nobody", "Nothing", 1), checked({}))
    with pytest.raises(EngineError, match=r"there is no custom op com.nobody.Nothing version 1"):
        host_call(custom.FORWARD, what, [torch.ones(1)], [Result(torch.float32, (1,))])


def test_results_share_no_memory_with_inputs_or_each_other():
    custom.register(
        OpName("test.memory", "Views", 1), custom.CustomOp(lambda inputs, attributes: (inputs[0], inputs[0]))
    )
    x = torch.arange(4.0)
    types = [Result.of(x), Result.of(x)]
    first, second = host_call(custom.FORWARD, custom.call_of(OpName("test.memory", "Views", 1), {}), [x], types)
    first.zero_()
    second.add_(1)
    assert x.tolist() == [0, 1, 2, 3]
    assert first.tolist() == [0, 0, 0, 0]
