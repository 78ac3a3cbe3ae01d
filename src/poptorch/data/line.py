"""Short messages between an accessor and its worker.

A message has a fixed size that the system transfers as a whole, so a process that is killed never leaves half a
message, and no wait is without a limit: reading and writing never block, `wait` takes the seconds.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from enum import IntEnum, auto
from typing import NamedTuple


class Kind(IntEnum):
    """What a message says; first those of the worker, then those of the accessor."""

    READY = auto()  # slot, number: where in the mailbox the layout of a slot begins, and its length
    FILLED = auto()  # slot: holds the next batch; number: generation
    FILLED_PARTLY = auto()  # the same, with fewer rows than the slot has room for
    END = auto()  # of an epoch; number: generation
    FAILED = auto()  # slot, number: where in the mailbox the reason begins, and its length
    WARNED = auto()  # slot, number: where in the mailbox a warning for the user begins, and its length
    FREE = auto()  # slot: may be filled again
    START = auto()  # an epoch is wanted; number: generation, a new one discards what was loaded before
    STOP = auto()


class Message(NamedTuple):
    kind: int
    slot: int
    number: int


_FORM = struct.Struct("<iiq")
_MANY = 4096 * _FORM.size


class Line:
    """One end of the connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._open()

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def _open(self) -> None:
        self._socket.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable.register(self._socket, select.POLLOUT)

    def send(self, kind: Kind, slot: int = 0, number: int = 0) -> bool:
        """Whether the message could be sent; not if the other side has long not read, or is gone."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            return self._socket.send(_FORM.pack(kind, slot, number)) == _FORM.size
        return False

    def receive(self) -> list[Message]:
        """The messages that are there now."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            return [Message(*fields) for fields in _FORM.iter_unpack(self._socket.recv(_MANY))]
        return []

    def wait(self, seconds: float, *, to_send: bool = False) -> bool:
        """Whether there is something to read (or room to write) before the time is over."""
        return bool((self._writable if to_send else self._readable).poll(seconds * 1000))

    def close(self) -> None:
        self._socket.close()

    def __getstate__(self) -> socket.socket:
        return self._socket

    def __setstate__(self, end: socket.socket) -> None:
        self._socket = end
        self._open()
