"""The random numbers of the device: one stream per replica, apart from the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from poptorch.errors import Error, explain


class RandomStreams:
    """Generator states of the replicas. Programs draw from torch's default generator, so a stream is swapped in."""

    def __init__(self, seed: int | None, replicas: int) -> None:
        self._seed = seed
        self._were_used = False
        first = torch.initial_seed() if seed is None else seed
        self._states = [_state(first + replica) for replica in range(replicas)]
        self._active: int | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let programs draw from these streams; the host's generator is untouched afterwards."""
        host = torch.get_rng_state()
        self._active, self._were_used = 0, True
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

    @property
    def words(self) -> list[int] | None:
        """Seed and states as numbers; the seed alone if nothing was drawn yet, None if there is not even that."""
        if not self._were_used:
            return None if self._seed is None else [self._seed]
        states = [number for state in self._states for number in state.view(torch.int64).tolist()]
        return [self._seed or 0, *states]

    @words.setter
    def words(self, words: list[int]) -> None:
        self._seed, self._were_used = words[0], len(words) > 1
        if not self._were_used:
            self._states = [_state(self._seed + replica) for replica in range(len(self._states))]
            return
        size = len(self._states[0]) // 8
        if len(words) != 1 + size * len(self._states):
            raise Error(
                explain(
                    f"rng_state has {len(words)} numbers, but {len(self._states)} replicas have "
                    f"{1 + size * len(self._states)}.",
                    fix="set what rng_state of a model with the same replicationFactor gave",
                )
            )
        states = torch.tensor(words[1:], dtype=torch.int64).view(len(self._states), size)
        self._states = [state.clone().view(torch.uint8) for state in states]  # torch ignores storage offsets


def _state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed % 2**63).get_state()
