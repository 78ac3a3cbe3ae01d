"""The random numbers of the device: one stream per replica, apart from the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomStreams:
    """Generator states of the replicas. Programs draw from torch's default generator, so a stream is swapped in."""

    def __init__(self, seed: int | None, replicas: int) -> None:
        first = torch.initial_seed() if seed is None else seed
        self._states = [_state(first + replica) for replica in range(replicas)]
        self._active: int | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let programs draw from these streams; the host's generator is untouched afterwards."""
        host = torch.get_rng_state()
        self._active = 0
        torch.set_rng_state(self._states[0])
        try:
            yield
        finally:
            self._states[self._active] = torch.get_rng_state()
            self._active = None
            torch.set_rng_state(host)

    def enter(self, replica: int) -> None:
        """The draws that follow belong to this replica."""
        if self._active is None or self._active == replica:
            return
        self._states[self._active] = torch.get_rng_state()
        torch.set_rng_state(self._states[replica])
        self._active = replica


def _state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed % 2**63).get_state()
