"""Signatures: roles, sizes and the short types that graphs print."""

from __future__ import annotations

import pytest
import torch

from poptorch.ir import InputSpec, OutputRole, OutputSpec, Role, Signature, tensor_type


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        (torch.float32, (3, 4), "f32[3,4]"),
        (torch.float16, (), "f16[]"),
        (torch.bfloat16, (1,), "bf16[1]"),
        (torch.int64, (2,), "i64[2]"),
        (torch.bool, (2, 0), "bool[2,0]"),
        (torch.complex64, (2,), "complex64[2]"),
    ],
)
def test_types_print_short(dtype, shape, text):
    assert tensor_type(dtype, shape) == text


def test_input_of_a_tensor_remembers_its_layout():
    spec = InputSpec.of("w", Role.PARAMETER, torch.empty(2, 3, dtype=torch.float16).t())
    assert (spec.shape, spec.stride, spec.nbytes) == ((3, 2), (1, 3), 12)
    assert str(spec) == "w: f16[3,2] parameter"


def test_signature_separates_state_from_user_inputs():
    weight = InputSpec("w", Role.PARAMETER, (1,), torch.float32, (1,))
    x = InputSpec("x", Role.USER_INPUT, (1,), torch.float32, (1,))
    signature = Signature(
        (weight, x), (OutputSpec("output0", OutputRole.USER_OUTPUT), OutputSpec("w", OutputRole.NEW_VALUE))
    )
    assert signature.state == (weight,)
    assert signature.user_inputs == (x,)
    assert signature.written == {"w"}
