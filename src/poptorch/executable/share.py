"""Which part of a program one process has, if the IPUs of a replica are spread over several processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poptorch.ir import Guard, InputSpec


@dataclass(frozen=True)
class Handover:
    """A value that one process computes and others need; its number is the same in all of them."""

    name: str
    number: int
    giver: int
    takers: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Home:
    """The process in which a parameter or buffer is kept up to date."""

    spec: InputSpec
    process: int


@dataclass(frozen=True)
class Share:
    """What a process knows about the others that have programs for other stages of the same replicas."""

    index: int
    count: int
    ipus: int  # of each replica in this process
    handovers: tuple[Handover, ...]  # from stage to stage, for every micro-batch
    outputs: tuple[Handover, ...]  # of a micro-batch, which all processes get
    met: tuple[Handover, ...]  # what updates need of gradients that are in several processes, once for each update
    homes: tuple[Home, ...]
    guards: tuple[Guard, ...] = ()
    drawer: int | None = None  # the process that draws random numbers

    @property
    def elsewhere(self) -> tuple[Home, ...]:
        """What other processes keep up to date."""
        return tuple(home for home in self.homes if home.process != self.index)
