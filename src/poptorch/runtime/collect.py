"""Join what the micro-batches of a call computed, as the output mode asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from poptorch.executable import AnchorPlan, Executable
from poptorch.ir import OutputRole

Outputs = dict[int, Sequence[torch.Tensor]]  # what is kept so far, by the first micro-batch that it is of
Anchored = dict[str, dict[int, torch.Tensor]]  # the values of each anchor so far, by micro-batch


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
        self._width = executable.schedule.width
        self._numbers = [spec.is_number for spec in executable.outputs]

    def keep(self, outputs: Outputs, result: Sequence[torch.Tensor], index: int) -> None:
        """Keep of a result what the call returns; `index` is the first micro-batch that the result is of."""
        if self._width == 1:
            if index in self.kept:
                outputs[index] = result
            return
        kept = [place for place in range(self._width) if index + place in self.kept]
        if kept and self._sums:
            outputs.update((index + place, self._of_one(result, place)) for place in kept)
        elif kept:
            assert kept[-1] - kept[0] == len(kept) - 1, "what is kept of a round are neighbours"
            outputs[index] = self._of_some(result, kept[0], len(kept))

    def _of_some(self, result: Sequence[torch.Tensor], first: int, count: int) -> list[torch.Tensor]:
        """The rows of some neighbours among the micro-batches that a result is of."""
        return [
            tensor.narrow(0, first * (rows := tensor.shape[0] // self._width), count * rows) if spec.batched else tensor
            for spec, tensor in zip(self._specs, result, strict=False)
        ]

    def _of_one(self, result: Sequence[torch.Tensor], place: int) -> list[torch.Tensor]:
        """What one of the micro-batches that a result is of would have returned by itself."""
        batched = [True] * len(result)
        batched[: len(self._specs)] = [spec.batched for spec in self._specs]
        return [
            tensor if not is_batched else tensor[place] if is_number else tensor.chunk(self._width)[place]
            for tensor, is_batched, is_number in zip(result, batched, self._numbers, strict=True)
        ]

    def begin(self) -> Anchored:
        """Where to put anchored values of a new call."""
        return {anchor.name: {} for anchor in self._anchors} if self.has_anchors else {}

    def take(self, anchored: Anchored, result: Sequence[torch.Tensor], index: int) -> None:
        """Keep what micro-batches from `index` on computed for anchors, which they return after the user's outputs."""
        if self._width == 1:
            self._take(anchored, result, index)
        else:
            for place in range(self._width):
                self._take(anchored, self._of_one(result, place), index + place)

    def _take(self, anchored: Anchored, result: Sequence[torch.Tensor], index: int) -> None:
        for position, anchor in enumerate(self._returned, start=len(self._specs)):
            if index in anchor.kept:
                anchored[anchor.name][index] = result[position]

    def take_state(
        self, anchored: Anchored, replicas: Sequence[Mapping[str, torch.Tensor]], indices: Sequence[int]
    ) -> None:
        """Keep the state that these micro-batches, or the update they belong to, left behind."""
        for anchor in self._state:
            for index in indices:
                if index in anchor.kept:
                    state = replicas[index % len(replicas)]
                    anchored[anchor.name][index] = state[str(anchor.state)].detach().clone()

    def join(self, outputs: Outputs) -> list[torch.Tensor]:
        """The user's outputs, from what the kept micro-batches returned."""
        kept = _in_order(outputs)
        if self._sums:
            kept = [self._sum(kept[replica :: self._replicas]) for replica in range(self._replicas)]
        elif self._width > 1:
            return self._join_rows(kept)
        if len(kept) == 1:
            return list(kept[0][: len(self._specs)])
        return [
            _join([result[i] for result in kept]) if spec.batched else kept[-1][i] for i, spec in enumerate(self._specs)
        ]

    def _join_rows(self, kept: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The user's outputs, from tensors that hold those of several micro-batches each."""
        joined = [
            torch.cat([part[i] for part in kept]) if spec.batched and len(kept) > 1 else kept[-1][i]
            for i, spec in enumerate(self._specs)
        ]
        if len(self.kept) > 1:
            return joined
        return [tensor[0] if spec.is_number else tensor for spec, tensor in zip(self._specs, joined, strict=True)]

    def join_anchors(self, anchored: Anchored) -> dict[str, torch.Tensor]:
        """The anchored tensors, by name."""
        if not anchored:
            return {}
        return {anchor.name: self._join_anchor(anchor, _in_order(anchored[anchor.name])) for anchor in self._anchors}

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


_Value = TypeVar("_Value")


def _in_order(found: Mapping[int, _Value]) -> list[_Value]:
    """What was found for each micro-batch, earlier ones first, whichever was ready first."""
    return [found[index] for index in sorted(found)] if len(found) > 1 else list(found.values())


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)
