"""Join what the micro-batches of a call computed, as the output mode asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from poptorch.executable import AnchorPlan, Executable
from poptorch.ir import OutputRole

Anchored = dict[str, list[torch.Tensor]]  # the values of each anchor so far


class Collector:
    """Knows which results of micro-batches a call returns, and how they are joined."""

    def __init__(self, executable: Executable) -> None:
        self._replicas = executable.batching.replicas
        self._sums = executable.batching.sums
        self._specs = [spec for spec in executable.outputs if spec.role is OutputRole.USER_OUTPUT]
        self._returned = [anchor for anchor in executable.anchors if anchor.state is None]
        self._state = [anchor for anchor in executable.anchors if anchor.state is not None]
        self._anchors = executable.anchors
        self.kept = frozenset(executable.batching.kept)  # the micro-batches whose outputs are returned
        self.has_anchors = bool(executable.anchors)

    def begin(self) -> Anchored:
        """Where to put anchored values of a new call."""
        return {anchor.name: [] for anchor in self._anchors}

    def take(self, anchored: Anchored, result: Sequence[torch.Tensor], index: int) -> None:
        """Keep what a micro-batch computed for anchors, which it returns after the user's outputs."""
        for position, anchor in enumerate(self._returned, start=len(self._specs)):
            if index in anchor.kept:
                anchored[anchor.name].append(result[position])

    def take_state(
        self, anchored: Anchored, replicas: Sequence[Mapping[str, torch.Tensor]], indices: Sequence[int]
    ) -> None:
        """Keep the state that these micro-batches, or the update they belong to, left behind."""
        for anchor in self._state:
            for index in indices:
                if index in anchor.kept:
                    state = replicas[index % len(replicas)]
                    anchored[anchor.name].append(state[str(anchor.state)].detach().clone())

    def join(self, kept: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The user's outputs, from what the kept micro-batches returned."""
        count = len(self._specs)
        if self._sums:
            kept = [self._sum(kept[replica :: self._replicas]) for replica in range(self._replicas)]
        if len(kept) == 1:
            return list(kept[0][:count])
        return [
            _join([result[i] for result in kept]) if spec.batched else kept[-1][i] for i, spec in enumerate(self._specs)
        ]

    def join_anchors(self, anchored: Anchored) -> dict[str, torch.Tensor]:
        """The anchored tensors, by name."""
        return {anchor.name: self._join_anchor(anchor, anchored[anchor.name]) for anchor in self._anchors}

    def _sum(self, outputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Add up what the micro-batches returned; what is the same in all of them is not multiplied."""
        return [
            torch.stack([result[i] for result in outputs]).sum(0, dtype=outputs[0][i].dtype)
            if spec.batched
            else outputs[0][i]
            for i, spec in enumerate(self._specs)
        ]

    def _join_anchor(self, anchor: AnchorPlan, values: list[torch.Tensor]) -> torch.Tensor:
        if anchor.sums:
            count = self._replicas
            values = [torch.stack(values[replica::count]).sum(0) for replica in range(count)]
        return values[0] if len(values) == 1 else _join(values)


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)
