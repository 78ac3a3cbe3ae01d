"""How a data set reaches the worker process. A forked one has it already; for others it is pickled.

That happens while the process starts, because only then queues and locks can be sent. The memory of tensors stays out
of the pickle: the worker maps it, so that both processes see the same numbers. Memory that cannot be mapped there, and
that of more tensors than a process may open files, is copied, unless the user has put it into shared memory.

The worker unpickles it all by itself, and not on its way there, so that it can tell what went wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # teaches Python's multiprocessing to send tensors

from poptorch._logging import logger
from poptorch.data.shared_file import SharedFile
from poptorch.enums import SharingStrategy

MOST_SHARED = 128  # a process that is started by a fork server inherits at most 256 open files
_ALIGNMENT = 64  # a cache line, and enough for every vector instruction


def send_by(strategy: SharingStrategy) -> Callable[[Iterable[Any]], Callable[[], Iterable[Any]]]:
    """How a data set is wrapped for its way to the worker, which calls the wrapper."""
    return InFile if strategy is SharingStrategy.FileSystem else Direct


class Direct:
    """A data set that reaches the worker as an argument."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._sent: Any = None  # what the worker is about to open, kept until it has

    def __call__(self) -> Iterable[Any]:
        return self._dataset

    def __reduce__(self) -> tuple[Callable[..., Pickled], tuple[Any, ...]]:
        content = io.BytesIO()
        pickler = _Pickler(content)
        pickler.dump(self._dataset)
        storages = list(pickler.storages.values())  # some only exist for the pickle, like that of a generator's state
        memory = Memory.of(storages)
        self._sent = (storages, memory)
        return Pickled, (content.getvalue(), memory)


class InFile(Direct):
    """A data set that reaches the worker as a pickle in a nameless temporary file."""

    def __reduce__(self) -> tuple[Callable[..., Filed], tuple[Any, ...]]:
        self._sent = file = SharedFile.on_disk()
        return Filed, (file, *file.append(pickle.dumps(self._dataset)))


@dataclass(frozen=True)
class Pickled:
    """A data set in the worker, before it is unpickled."""

    content: bytes
    memory: Memory

    def __call__(self) -> Iterable[Any]:
        return _Unpickler(io.BytesIO(self.content), self.memory.storages()).load()


@dataclass(frozen=True)
class Filed:
    """A data set in the worker, before it is read from its file."""

    file: SharedFile
    begin: int
    nbytes: int

    def __call__(self) -> Iterable[Any]:
        return pickle.loads(self.file.read(self.begin, self.nbytes))


class _Pickler(ForkingPickler):
    """Leaves the memory of tensors out of the pickle and collects it instead."""

    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content, pickle.HIGHEST_PROTOCOL)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.UntypedStorage or obj.device.type != "cpu" or obj.nbytes() == 0:
            return None
        self.storages.setdefault(obj._cdata, obj)
        return self._numbers.setdefault(obj._cdata, len(self._numbers))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(content)
        self._storages = storages

    def persistent_load(self, pid: Any) -> torch.UntypedStorage:
        return self._storages[pid]


@dataclass(frozen=True)
class Memory:
    """The memory of tensors on its way: shared, read again from its file, or copied to a file of ours."""

    places: tuple[Place, ...]
    shared: bytes  # a pickle of those that are shared
    copies: SharedFile

    @classmethod
    def of(cls, storages: Sequence[torch.UntypedStorage]) -> Memory:
        copies, shared, places = SharedFile.in_memory(), list[torch.UntypedStorage](), list[Place]()
        may_share = len(storages) <= MOST_SHARED
        for storage in storages:
            name = _file_of(storage)
            if name is not None:
                places.append(Place("file", name, storage.nbytes()))
            elif is_in_shared_memory(storage) or (may_share and _move_to_shared_memory(storage)):
                places.append(Place("shared", len(shared), storage.nbytes()))
                shared.append(storage)
            else:
                begin, nbytes = copies.append(_bytes_of(storage), alignment=_ALIGNMENT)
                places.append(Place("copy", begin, nbytes))
        if copies.nbytes:
            logger.debug("a data worker gets a copy of %d bytes of tensors, which it cannot share", copies.nbytes)
        return cls(tuple(places), bytes(ForkingPickler.dumps(shared)), copies)

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory, in the worker."""
        shared = pickle.loads(self.shared)
        copies = self.copies.mapped() if self.copies.nbytes else b""
        return [place.opened(shared, copies) for place in self.places]


@dataclass(frozen=True)
class Place:
    """Where the worker finds the memory of one tensor."""

    kind: str
    where: Any  # the name of a file, the number of a shared storage, or where a copy begins
    nbytes: int

    def opened(self, shared: Sequence[torch.UntypedStorage], copies: Any) -> torch.UntypedStorage:
        if self.kind == "shared":
            return shared[self.where]
        if self.kind == "file":
            return torch.from_file(self.where, shared=True, size=self.nbytes, dtype=torch.uint8).untyped_storage()
        return torch.frombuffer(copies, dtype=torch.uint8, count=self.nbytes, offset=self.where).untyped_storage()


def is_in_shared_memory(storage: torch.UntypedStorage) -> bool:
    """Whether another process can map a storage as it is; a mapped file counts as shared too, but has no descriptor."""
    if not storage.is_shared():
        return False
    return torch.multiprocessing.get_sharing_strategy() == "file_system" or storage._share_fd_cpu_()[0] >= 0


def _move_to_shared_memory(storage: torch.UntypedStorage) -> bool:
    """Whether it worked; there may be too little of it."""
    with contextlib.suppress(RuntimeError, OSError):
        storage.share_memory_()
        return is_in_shared_memory(storage)
    return False


def _file_of(storage: torch.UntypedStorage) -> str | None:
    """The file that a storage is mapped from, if it still has this name, so that the worker can map it, too."""
    name = storage.filename
    if name is None or not storage.is_shared():
        return None
    with contextlib.suppress(OSError):
        return os.path.abspath(name) if os.stat(name).st_ino == _mapped_inode(storage.data_ptr()) else None
    return None


def _mapped_inode(address: int) -> int | None:
    """The number of the file that lies at this address, where the system tells (it needs Linux's /proc)."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        begin, end = (int(number, 16) for number in addresses.split("-"))
        if begin <= address < end:
            return int(inode)
    return None


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
