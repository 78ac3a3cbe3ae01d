"""The state of an inference program: copies of parameters and buffers, taken when it is made and on request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.capture import Holder
from poptorch.errors import ArgumentError
from poptorch.executable import Executable, Share
from poptorch.ir import InputSpec, Role, with_stride
from poptorch.model.clock import clocks_of
from poptorch.model.modes import ModuleWatch, replaced_error
from poptorch.model.optimizers import OptimizerSet
from poptorch.model.program_state import HostLayouts, ProgramState, Strides, registered_tensor
from poptorch.optim.plan import OptimizerPlan
from poptorch.options import Settings
from poptorch.processes import Team


class Snapshot:
    """Copies that only the program changes. They are renewed by themselves after a training executor has trained."""

    def __init__(self, module: nn.Module, executable: Executable, strides: Strides, warned: set[str]) -> None:
        self._module, self._warned = module, warned
        self._executable = executable
        self._specs = self._laid_out(strides)
        self._written = executable.written_by_steps
        self._clocks = clocks_of(module.parameters())
        self._seen = self._times()  # the times of the training executors whose work the copies show
        self._refreshed: list[int] | None = None  # the same for copies that no session works on yet
        self._originals = self._find()
        self._copies = {
            spec.name: with_stride(self._originals[spec.name].detach().to(spec.dtype), spec.stride, always_copy=True)
            for spec in self._specs
        }
        self._versions = self._host_versions()
        self.is_host_stale = False

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._copies

    def confirm(self) -> None:
        if self._refreshed is not None:
            self._seen, self._refreshed = self._refreshed, None

    def lay_out(self, strides: Strides) -> None:
        self._specs = self._laid_out(strides)
        self._copies = {spec.name: with_stride(self._copies[spec.name], spec.stride) for spec in self._specs}

    def _laid_out(self, strides: Strides) -> list[InputSpec]:
        layouts = HostLayouts(strides, self._executable.binding.groupings)
        return [layouts.host(spec) for spec in self._executable.state if spec.role in (Role.PARAMETER, Role.BUFFER)]

    def has_changed(self, watch: ModuleWatch) -> bool:
        """Whether the copies had to be renewed. If only the host changed something, they are not, with a warning."""
        if self._times() != self._seen:
            logger.debug("Implicit copyWeightsToDevice()")
            self.refresh(watch)
            return True
        if "host" not in self._warned and (watch.replaced() or self._versions != self._host_versions()):
            self._warned.add("host")
            logger.warning(
                "the weights of an inference model were changed on the host after it was compiled; it goes on with "
                "the old ones. Call copyWeightsToDevice() to use the new ones."
            )
        return False

    def begin_call(self) -> None:
        """Nobody else works on the copies."""

    def end_call(self) -> None:
        self.is_host_stale |= bool(self._written)

    def refresh(self, watch: ModuleWatch, names: Collection[str] | None = None) -> None:
        """Take the values that the module has now, of all parameters and buffers or only of these."""
        if names is None:
            logger.debug("Writing weights from host to IPU memory")
            self._seen = []  # if this fails, the next call tries again
            if replaced := watch.replaced():
                raise ArgumentError(replaced_error(replaced))
            self._refreshed = self._times()
        self._originals = self._find()
        for name, copy in self._copies.items():
            if names is None or name in names:
                copy.copy_(self._originals[name].detach())
        self._versions = self._host_versions()
        self.is_host_stale &= names is not None

    def take_over(self, before: ProgramState) -> None:
        """Go on with what another program of the same model has computed for its buffers."""
        if isinstance(before, Snapshot):
            for name in before._written:
                if name in self._copies:
                    self._copies[name].copy_(before._copies[name])
            self.is_host_stale = before.is_host_stale

    def write_back(self) -> None:
        logger.debug("Writing weights from IPU to host")
        with torch.no_grad():
            for name in self._written:
                original, copy = self._originals[name], self._copies[name]
                if original.dtype != copy.dtype:
                    original.data = original.to(copy.dtype)
                original.copy_(copy)
        self._versions = self._host_versions()
        self.is_host_stale = False

    def fetch_optimizer(self, share: Share, group: Team) -> None:
        """An inference program has nothing to do with optimisers."""

    has_rows_only, rows = False, ()

    def begin_alike(self, group: Team) -> None:
        """An inference program has nothing to do with optimisers."""

    bring_rows_together = begin_alike

    def connect(self, optimizers: OptimizerSet, holders: Mapping[str, Holder], settings: Settings) -> None:
        """An inference program has nothing to do with optimisers."""

    def accepts(self, plans: Sequence[OptimizerPlan], holders: Mapping[str, Holder]) -> bool:
        """An inference program has nothing to do with optimisers."""
        return True

    def go_on_with(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[OptimizerPlan],
        holders: Mapping[str, Holder],
    ) -> None:
        """An inference program has nothing to do with optimisers."""

    def _times(self) -> list[int]:
        return [clock.time for clock in self._clocks]

    def _host_versions(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in self._originals.values()]

    def _find(self) -> dict[str, torch.Tensor]:
        return {spec.name: registered_tensor(self._module, spec) for spec in self._specs}
