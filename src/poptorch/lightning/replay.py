"""What the host does after a call: log entries, metrics and lists of the step, and its result for the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

import poptorch
from poptorch.lightning import batches, nested
from poptorch.lightning.packages import Lightning
from poptorch.lightning.placeholders import Count, HostNumber, Kept, Pending, Slot
from poptorch.lightning.recording import Appended, HostCall, Logged, Recording
from poptorch.lightning.results import Batching, combined, reduced


class Replay:
    """One call: fills what was recorded with the values that the program has computed."""

    def __init__(
        self, package: Lightning, module: Any, batching: Batching, recording: Recording, outputs: Sequence[torch.Tensor]
    ) -> None:
        self._package, self._module, self._batching, self._recording = package, module, batching, recording
        self._copies = [output.widened(value) for output, value in zip(recording.outputs, outputs, strict=True)]
        self._pending: dict[int, Any] = {}

    def run(self, batch: Any, counts: Mapping[str, int], *, combines: bool) -> Any:
        """Repeat what the step did beside computing, in its order, and give its result."""
        self._batch, self._counts = batch, counts
        for index, event in enumerate(self._recording.events):
            if isinstance(event, HostCall):
                method = event.target if event.method == "forward" else getattr(event.target, event.method)
                args, kwargs = self._filled((event.args, event.kwargs), combines=event.combines)
                self._pending[index] = method(*args, **kwargs)
            else:
                self._log(event)
        for appended in self._recording.appended:
            _list_of(self._module, appended).extend(self._filled(appended.values, combines=True))
        return self._filled(self._recording.result, combines=combines)

    def _filled(self, template: Any, *, combines: bool) -> Any:
        return nested.mapped(template, lambda _, leaf: self._value(leaf, combines))

    def _value(self, leaf: Any, combines: bool) -> Any:
        if isinstance(leaf, Slot):
            copies = self._copies[leaf.index]
            value = combined(copies, self._recording.outputs[leaf.index], self._batching) if combines else copies
            return value.item() if leaf.is_item and value.numel() == 1 else value
        if isinstance(leaf, HostNumber):
            return leaf.read()
        if isinstance(leaf, Count):
            return self._counts[leaf.name]
        if isinstance(leaf, Pending):
            found = self._pending[leaf.event]
            return found if leaf.key is None else found[leaf.key]
        return self._leaves[leaf.name] if isinstance(leaf, Kept) else leaf

    @cached_property
    def _leaves(self) -> dict[str, Any]:
        return dict(nested.leaves(self._batch, batches.NAME))

    def _log(self, event: Logged) -> None:
        is_computed = isinstance(event.value, Slot)
        value = (
            self._reduced(event, self._copies[event.value.index]) if is_computed else self._value(event.value, False)
        )
        arguments = event.arguments
        if arguments.get("batch_size") is not None:  # said for one micro-batch
            arguments = {**arguments, "batch_size": arguments["batch_size"] * self._batching.micro_batches}
        self._module.log(event.name, value, **arguments)

    def _reduced(self, event: Logged, copies: torch.Tensor) -> torch.Tensor:
        if self._batching.mode is poptorch.OutputMode.Sum and event.reduction in ("min", "max"):
            raise self._package.MisconfigurationException(
                f"`self.log({event.name!r}, reduce_fx={event.reduction!r})` needs every value, and OutputMode.Sum only "
                "returns their sum: choose OutputMode.All in the options of this stage."
            )
        return reduced(copies, event.reduction or "mean", self._batching)


def _list_of(module: Any, appended: Appended) -> list[Any]:
    """The list to append to, as it is now; a missing one at the end of the path is made."""
    box = getattr(module, appended.path[0])
    for key in appended.path[1:]:
        if isinstance(box, dict) and key not in box:
            box[key] = []
        box = box[key]
    return box
