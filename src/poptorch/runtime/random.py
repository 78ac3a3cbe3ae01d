"""The random numbers of the device: one generator per replica, apart from the host's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poptorch.errors import Error, explain


@dataclass(frozen=True)
class RandomState:
    """Where random numbers stand, whether any was drawn or not."""

    seed: int | None
    were_used: bool
    states: tuple[torch.Tensor, ...]  # of each replica


class RandomStreams:
    """The generators of the replicas. Programs draw from them alone, so neither the host nor another model notices."""

    def __init__(self, seed: int | None, replicas: int, process: int = 0) -> None:
        """The streams of the replicas of a process, which are counted over all processes of a program."""
        self._seed = seed
        self.first_replica = process * replicas  # among those of all processes
        self.were_used = False
        self.generators = [torch.Generator() for _ in range(replicas)]
        self.start_at(torch.initial_seed() if seed is None else seed)

    def start_at(self, number: int) -> None:
        """Draw from the beginning: the first replica of all has this seed, and every other one the next."""
        for replica, generator in enumerate(self.generators, start=self.first_replica):
            generator.manual_seed((number + replica) % 2**63)

    def save(self) -> list[torch.Tensor]:
        """What `restore` needs to go back to this moment."""
        return [generator.get_state() for generator in self.generators]

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def go_on_from(self, other: RandomStreams) -> None:
        """Draw what the generators of another program of the same model would have drawn next."""
        self._seed, self.were_used = other._seed, other.were_used
        self.restore(other.save())

    @property
    def state(self) -> RandomState:
        """Where the numbers stand now; setting it goes on from there."""
        return RandomState(self._seed, self.were_used, tuple(self.save()))

    @state.setter
    def state(self, state: RandomState) -> None:
        self._seed, self.were_used = state.seed, state.were_used
        self.restore(state.states)

    @property
    def words(self) -> list[int] | None:
        """Seed and states as numbers; the seed alone if nothing was drawn yet, None if there is not even that."""
        if not self.were_used:
            return None if self._seed is None else [self._seed]
        states = [number for state in self.save() for number in state.view(torch.int64).tolist()]
        return [self._seed or 0, *states]

    @words.setter
    def words(self, words: list[int]) -> None:
        size, replicas = len(self.generators[0].get_state()) // 8, len(self.generators)
        if len(words) > 1 and len(words) != 1 + size * replicas:
            raise Error(
                explain(
                    f"rng_state has {len(words)} numbers, but {replicas} replicas have {1 + size * replicas}.",
                    fix="set what rng_state of a model with the same replicationFactor gave",
                )
            )
        self._seed, self.were_used = words[0], len(words) > 1
        if not self.were_used:
            self.start_at(self._seed)
            return
        states = torch.tensor(words[1:], dtype=torch.int64).view(replicas, size)
        self.restore([state.clone().view(torch.uint8) for state in states])  # torch ignores storage offsets
