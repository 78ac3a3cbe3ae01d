"""Small batches travel inside the message that announces them.

PyTorch hands each tensor of a worker over as a descriptor of shared memory. That takes a connection and a handshake,
most of a millisecond for both sides together, however small the tensor is. A few kilobytes are copied much faster.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

LARGEST_NBYTES = 64 * 1024  # as much as a pipe takes without waiting for its reader


@dataclass(frozen=True)
class Packed:
    """A batch as bytes; whoever receives it in a message gets the batch itself."""

    content: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.content,)


class PackSmall:
    """A collate function for a worker: what another one gives, packed if it is small enough."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return packed(self._collate(samples))


def packed(batch: Any) -> Any:
    """The batch as bytes, or itself if its tensors are large; everything but tensors is always sent as bytes."""
    content = io.BytesIO()
    try:
        _Packer(content).dump(batch)
    except _TooLarge:
        return batch
    return Packed(content.getvalue())


class _TooLarge(Exception):
    """There are too many bytes to copy."""


class _Packer(ForkingPickler):
    """Writes plain tensors by value, and whatever is special about others as PyTorch does."""

    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content, pickle.HIGHEST_PROTOCOL)
        self._room = LARGEST_NBYTES

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or not _is_plain(thing):
            return NotImplemented
        self._room -= thing.nbytes
        if self._room < 0:
            raise _TooLarge
        content = bytearray(thing.nbytes)
        if content:
            torch.frombuffer(content, dtype=thing.dtype).view(thing.shape).copy_(thing)
        return _tensor_of, (content, thing.dtype, tuple(thing.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether bytes, type and shape say everything about it."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor_of(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)
