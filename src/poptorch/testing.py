"""What helps to test programs that use PopTorch. Import it explicitly: `import poptorch.testing`."""

from __future__ import annotations

from typing import Any

import torch

from poptorch.faults import FAULTS, Fault


def allclose(ref: Any, other: Any) -> bool:
    """Whether two results are close: tensors by `torch.allclose`, tuples and lists of them item by item.

    >>> import torch, poptorch.testing
    >>> poptorch.testing.allclose((torch.ones(2), [torch.zeros(1)]), (torch.ones(2), [torch.zeros(1)]))
    True
    """
    if isinstance(ref, torch.Tensor) and isinstance(other, torch.Tensor):
        return ref.shape == other.shape and torch.allclose(ref, other)
    if type(ref) is not type(other):
        return False
    if isinstance(ref, (tuple, list)):
        return len(ref) == len(other) and all(allclose(one, two) for one, two in zip(ref, other, strict=True))
    return bool(ref == other)


def injectFault(kind: str, call: int = 1) -> None:
    """Let a coming call of a model fail: the next one, or the n-th from now.

    The kind is `"recoverable"`, `"recoverable:"` with a reset such as `IPU_RESET`, or `"unrecoverable"`. The call fails
    before it runs, so weights and optimiser state are as they were.
    """
    FAULTS.waiting = Fault(kind, call)
