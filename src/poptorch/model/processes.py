"""A model that several processes train together: how they begin, and how they fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch
from torch import nn

from poptorch._logging import log_as_process, warn_once
from poptorch.errors import FileContentError, ProcessError, explain
from poptorch.executable import Executable
from poptorch.ir import Role
from poptorch.model.elsewhere import fetch, release
from poptorch.model.variants import Variant
from poptorch.options import Settings
from poptorch.processes import Group, Team, connect, together
from poptorch.runtime import RandomStreams, Seat

_SHARED = (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE)


class Companions:
    """The other processes that train a model; for inference there are only those that have other stages."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self._module, self._trains = module, settings.is_training
        self._processes = settings.processes
        self._needed = (settings.is_training and settings.processes.count > 1) or settings.processes.parts > 1
        self._caches = settings.files.caches
        self.group: Group | None = None
        self.seat = Seat(settings.processes.index)
        self.lacks_weights = False  # whether others have weights of which this process knows nothing
        if settings.processes.count * settings.processes.parts > 1:
            log_as_process(settings.processes.rank)

    def connect(self, engine: str) -> None:
        """Find the others, before anything is done together."""
        if not self._needed or (self.group is not None and self.group.is_open):
            return
        here = self._processes
        count = here.count * here.parts
        self.group = connect(here.rank, count)
        stages, companions = (None, self.group) if here.parts == 1 else self.group.teams(here.parts)
        self.seat = Seat(here.index, companions if here.count > 1 else None, stages)
        if engine != "eager" and not self._caches and self._processes.parts == 1:
            warn_once(
                f"each of the {count} processes compiles the model by itself: with "
                "Options.enableExecutableCaching(path) one of them does, and the others take it from there."
            )

    def check(self, executable: Executable) -> None:
        """Raise if a program from a file was compiled for another number of processes, and trains."""
        reduction, here = executable.schedule.reduction, self._processes
        count = 1 if reduction is None else reduction.processes
        if count != here.count and (reduction is not None or executable.trains):
            raise FileContentError(
                explain(
                    f"the program was compiled to train in {count} process(es), and this is process {here.index} of "
                    f"{here.count}.",
                    fix=f"start {count} process(es), call Options.Distributed.configureProcessId accordingly, or "
                    "compile the model anew",
                )
            )

    def compiling(self, made: Callable[[], Variant | None]) -> AbstractContextManager[None]:
        """All processes make a program inside: if one cannot, or makes another one than the first, all raise.

        They run it on the same engine too: an update on two engines differs by rounding, and weights would drift apart.
        """
        return together(self.group, "compiling the model", lambda: _name(made()))

    def start(self, variant: Variant, *, goes_on: bool = False) -> None:
        """Begin with the weights and the optimiser state of the first process.

        Random numbers start at its seed. If they go on from a file, they do so, unless processes would draw the same.
        """
        if self.group is None:
            return
        executable = variant.session.executable
        if self._trains and self.seat.companions is not None:
            self._spread_state(self.seat.companions, variant)
        self.let_go(variant)
        if goes_on:
            self._separate(variant.session.random)
        elif executable.random_seed is None:
            variant.session.random.start_at(self.group.number_of_first(torch.initial_seed() % 2**63))

    def _separate(self, random: RandomStreams) -> None:
        """Give processes that read the same file random numbers of their own."""
        assert self.group is not None
        own = _number_of(random.save()[0])
        first = self.group.number_of_first(own)
        if self.group.index and own == first:
            random.start_at(own)

    def _spread_state(self, group: Team, variant: Variant) -> None:
        state = variant.state.tensors()
        executable = variant.session.executable
        cut = {shard.name: shard.own_shape for shard in executable.binding.shards}
        shared = [
            spec.name
            for spec in executable.state
            if spec.role in _SHARED and not (spec.role is Role.OPTIMIZER_STATE and cut.get(spec.owner) == spec.shape)
        ]
        with torch.no_grad():
            group.spread([state[name] for name in shared])
            variant.state.begin_alike(group)
        variant.session.bind(state)
        variant.state.confirm()

    def let_go(self, variant: Variant) -> None:
        """Before a program trains: leave to other processes what they change."""
        share = variant.session.executable.share
        if self._trains and share is not None and not self.lacks_weights:
            release(self._module, share)
            self.lacks_weights = True

    def fetch(self, variant: Variant) -> None:
        """Bring what other processes have changed; all of them must do so."""
        share, stages = variant.session.executable.share, self.seat.stages
        if share is not None and stages is not None:
            fetch(self._module, share, stages)
            variant.state.fetch_optimizer(share, stages)
            self.lacks_weights = False
        if self.seat.companions is not None:
            variant.state.bring_rows_together(self.seat.companions)

    def refuse(self, variant: Variant | None, error: Exception) -> None:
        """A call fails here, for a reason that the others do not know: it shall fail there too."""
        group = self.group
        if group is not None and variant is not None and not group.knows(error):
            group.tell(error)
            with suppress(ProcessError):  # the others are gone; what this process has to say comes first
                variant.session.refuse()


def _number_of(state: torch.Tensor) -> int:
    """A number that tells states of a generator apart."""
    return int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:7], "little")


def _name(variant: Variant | None) -> str:
    if variant is None:
        return ""
    return f"{variant.engine}:{variant.session.executable.common_digest}"
