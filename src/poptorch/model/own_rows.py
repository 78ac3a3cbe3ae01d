"""The optimiser's state for the rows of parameters that this process updates.

Optimisers show that there is such state, with its shape and type, but their tensors are on the meta device: no process
has the values of all rows. `whole` brings them together, until the model trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from poptorch.errors import OptimizerStateError, explain
from poptorch.executable import Shard
from poptorch.ir import InputSpec, with_stride
from poptorch.model.program_state import whereabouts
from poptorch.processes import Team


class OwnRows:
    """Rows by the names of inputs; all programs of a model work on the same ones."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._rows: dict[str, torch.Tensor] = {}
        self._shown: dict[str, torch.Tensor] = {}
        self._first: dict[str, torch.Tensor] | None = {}  # what this process began with, until all begin alike

    def shard(self, spec: InputSpec) -> Shard | None:
        """How the rows of a state are shared out, if they are."""
        shard = self._shards.get(spec.owner)
        return shard if shard is not None and spec.shape == shard.shape else None

    def take(self, spec: InputSpec, shard: Shard, found: torch.Tensor | None, make: Callable[[], torch.Tensor]) -> None:
        """Keep the rows of what an optimiser has; if it has nothing, of what it starts with."""
        if self.are_shown(spec, found):
            self._rows[spec.name] = with_stride(self._rows[spec.name], spec.stride)
            return
        if found is not None and found.is_meta:
            raise OptimizerStateError(_elsewhere(spec))
        if found is not None and tuple(found.shape) != shard.shape:
            raise OptimizerStateError(misshapen(found, spec))
        if self._first is not None and found is not None:
            self._first[spec.name] = found
        rows = make() if found is None else found[shard.rows]
        rows = rows.detach().to(spec.dtype)
        self._rows[spec.name] = with_stride(rows, spec.stride, always_copy=True)
        self._shown[spec.name] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")

    def are_shown(self, spec: InputSpec, found: object) -> bool:
        """Whether what an optimiser has only shows that there are rows."""
        return found is not None and found is self._shown.get(spec.name)

    def rows(self, spec: InputSpec) -> torch.Tensor:
        """What the program works on."""
        return self._rows[spec.name]

    def shown(self, spec: InputSpec) -> torch.Tensor:
        """What the optimiser shows."""
        return self._shown[spec.name]

    def begin_alike(self, spec: InputSpec, group: Team, make: Callable[[], torch.Tensor]) -> None:
        """Start with what the first process has; `make` gives what its optimiser starts with."""
        shard, first = self._shards[spec.owner], (self._first or {}).pop(spec.name, None)
        whole = torch.empty(shard.shape, dtype=spec.dtype)
        if group.index == 0:
            whole.copy_(make() if first is None else first.detach())
        group.spread([whole])
        self._rows[spec.name].copy_(whole[shard.rows])

    def have_begun(self) -> None:
        """What this process alone began with is not needed any more."""
        self._first = None

    def whole(self, spec: InputSpec, group: Team) -> torch.Tensor:
        """All rows, from all processes, which must all ask for them."""
        shard = self._shards[spec.owner]
        found = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        found[shard.rows] = self._rows[spec.name]
        group.gather_rows(found, shard.bounds)
        return found


def misshapen(tensor: torch.Tensor, wanted: InputSpec) -> str:
    return explain(
        f"the optimiser has {wanted.key} of shape {list(tensor.shape)}{whereabouts(tensor)} "
        f"for parameter {wanted.owner}, "
        f"which needs {list(wanted.shape)}.",
        reason="a state dictionary of another model was loaded, or the entry was replaced",
        fix="load the state that belongs to this model, or clear the optimiser's state",
    )


def _elsewhere(spec: InputSpec) -> str:
    return explain(
        f"the optimiser has no values of {spec.key} for parameter {spec.owner}.",
        reason="processes share out the rows of the optimiser's state, and this tensor was taken without them",
        options="TensorLocations.setOptimizerLocation(…useReplicatedTensorSharding())",
        fix="call copyWeightsToHost() in all processes before state_dict(), destroy() or another executor",
    )
