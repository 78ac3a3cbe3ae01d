"""What ops use of PyTorch's private parts still does what it is used for."""

from __future__ import annotations

import torch

from poptorch.compiler.private import refusing_unknown_ops
from poptorch.ops import private


def test_ops_of_a_namespace_are_listed():
    assert any("ctc_loss" in name for name in private.op_names("poptorch"))
    assert not private.op_names("no_such_namespace")


def test_vmap_can_be_told_to_refuse():
    with refusing_unknown_ops():
        assert torch.equal(torch.func.vmap(torch.sin)(torch.zeros(2)), torch.zeros(2))
