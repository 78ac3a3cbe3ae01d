"""Memory that two processes share and that has no name, so that nothing is left behind however they end."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import torch


class SharedFile:
    """A nameless file that can be handed to a process that is being started."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def in_memory(cls) -> SharedFile:
        """A file in memory where the system has such files, otherwise on disk."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("poptorch"))
        return cls.on_disk()

    @classmethod
    def on_disk(cls) -> SharedFile:
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return os.fstat(self._descriptor).st_size

    def append(self, content: bytes | memoryview, alignment: int = 1) -> tuple[int, int]:
        """Add content at the end, or at the next multiple of a number; gives where it begins and how long it is."""
        begin = -(-self.nbytes // alignment) * alignment
        written = 0
        while written < len(content):
            written += os.pwrite(self._descriptor, memoryview(content)[written:], begin + written)
        return begin, len(content)

    def read(self, begin: int, length: int) -> bytes:
        """A part of the content."""
        parts: list[bytes] = []
        while length > 0:
            parts.append(os.pread(self._descriptor, length, begin))
            if not parts[-1]:
                raise EOFError(f"{length} bytes are missing")
            begin, length = begin + len(parts[-1]), length - len(parts[-1])
        return b"".join(parts)

    def reserve(self, nbytes: int) -> None:
        """Make room now: running out of memory is an error here, but would be a crash at the first write."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, nbytes)
        else:
            os.ftruncate(self._descriptor, nbytes)

    def mapped(self, nbytes: int = 0) -> mmap.mmap:
        """The first bytes, or all of them; valid for as long as they are referenced, even after `close`."""
        return mmap.mmap(self._descriptor, nbytes)

    def as_tensor(self, nbytes: int) -> torch.Tensor:
        """The first bytes as a tensor."""
        return torch.frombuffer(self.mapped(nbytes), dtype=torch.uint8)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., SharedFile], tuple[Any, ...]]:
        return _adopt, (reduction.DupFd(self._descriptor),)


def _adopt(duplicate: Any) -> SharedFile:
    return SharedFile(duplicate.detach())
