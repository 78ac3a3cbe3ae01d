"""What the nodes of a graph compute: tensors without numbers, that know their shape, type and strides.

All graphs share one mode for such tensors, so that values of any two graphs may meet in an op.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poptorch.ir.signature import InputSpec

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


@functools.cache
def fake_mode() -> FakeTensorMode:
    """The mode in which ops compute shapes and types only."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a while to import, so only when it is used

    return FakeTensorMode(allow_non_fake_inputs=True)


def value_of(node: fx.Node) -> Any:
    """The tensor (or tuple of them) without numbers that a node computes."""
    return node.meta.get("val")


def describe(spec: InputSpec) -> torch.Tensor:
    """A tensor without numbers as an input takes it."""
    with fake_mode():
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)


@functools.lru_cache(maxsize=2**16)
def describe_once(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    """The same tensor without numbers, whenever one like this is asked for by this number.

    A deep model has thousands of inputs, and its graph is made again by many passes: all these graphs share what
    describes their inputs. The inputs of one graph must not share memory, so that those alike have different numbers.
    """
    with fake_mode():
        return torch.empty_strided(shape, stride, dtype=dtype)


def update_value(node: fx.Node) -> None:
    """Note on a node what it computes for the operands that it has now."""
    args: Any = fx.map_arg(node.args, value_of)
    kwargs: Any = fx.map_arg(node.kwargs, value_of)
    target: Any = node.target
    with fake_mode():
        node.meta = {**node.meta, "val": target(*args, **kwargs)}


def with_stride(tensor: torch.Tensor, stride: tuple[int, ...], *, always_copy: bool = False) -> torch.Tensor:
    """The values of a tensor in another memory layout; the tensor itself if it has that layout already."""
    if tensor.stride() == stride and not always_copy:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
