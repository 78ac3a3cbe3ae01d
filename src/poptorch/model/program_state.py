"""What an executor needs of the state of a program, whether it trains or only infers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from poptorch.capture import Holder
from poptorch.capture.statistics import is_widened
from poptorch.engines import Kernel
from poptorch.errors import ArgumentError, explain
from poptorch.executable import Grouping, Share
from poptorch.ir import InputSpec, Role
from poptorch.model.modes import ModuleWatch
from poptorch.model.optimizers import OptimizerSet
from poptorch.optim.plan import OptimizerPlan
from poptorch.options import Settings
from poptorch.processes import Team

Strides = Mapping[str, tuple[int, ...]]
GONE = (KeyError, RuntimeError)  # what tables of modules and optimisers, and those of scripted modules, raise


def strides_of(kernels: Mapping[str, Kernel]) -> Strides:
    """The memory layouts that kernels want for state that must change its own."""
    return {name: stride for kernel in kernels.values() for name, stride in kernel.strides.items()}


class Rows(NamedTuple):
    """The part of a tensor of an optimiser's state that this process has; `spec` describes the whole."""

    parameter: nn.Parameter
    spec: InputSpec
    tensor: torch.Tensor
    processes: int


class ProgramState(Protocol):
    """The tensors of a program, found in their owners: the module and the optimisers."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, by the name of the input that takes it; they count as new until `confirm`."""
        ...

    def confirm(self) -> None:
        """A session works on the tensors that were handed out last."""
        ...

    def lay_out(self, strides: Strides) -> None:
        """Let `tensors` give the same values in these layouts; those that are not named have the program's."""
        ...

    def has_changed(self, watch: ModuleWatch) -> bool:
        """Before a call: whether a session must be bound to `tensors()` again, because their owners changed them."""
        ...

    def begin_call(self) -> None:
        """A call is about to run the program."""
        ...

    def end_call(self) -> None:
        """A call has run the program."""
        ...

    def refresh(self, watch: ModuleWatch, names: Collection[str] | None = None) -> None:
        """Take the values that the owners have now: of everything, or only of these buffers."""
        ...

    def take_over(self, before: ProgramState) -> None:
        """Go on with what another program of the same model has left."""
        ...

    @property
    def is_host_stale(self) -> bool:
        """Whether the program has changed buffers of which the module does not know."""
        ...

    def write_back(self) -> None:
        """Give the module the values that the program has computed for its buffers."""
        ...

    def fetch_optimizer(self, share: Share, group: Team) -> None:
        """Bring what other processes know about the parameters that they train; all of them must do so."""
        ...

    @property
    def has_rows_only(self) -> bool:
        """Whether other processes have state of which the optimisers here show no values."""
        ...

    @property
    def rows(self) -> Sequence[Rows]:
        """What this process has of the optimisers' state that is shared out over processes."""
        ...

    def begin_alike(self, group: Team) -> None:
        """Let all processes have their rows of what the optimisers of the first one have."""
        ...

    def bring_rows_together(self, group: Team) -> None:
        """Give the optimisers all rows, until a session is bound next; all processes must do so."""
        ...

    def connect(self, optimizers: OptimizerSet, holders: Mapping[str, Holder], settings: Settings) -> None:
        """Let the optimisers, which hold these parameters, show what the program knows about them."""
        ...

    def accepts(self, plans: Sequence[OptimizerPlan], holders: Mapping[str, Holder]) -> bool:
        """Whether the program can go on with these optimisers; if not, the model has to be compiled again."""
        ...

    def go_on_with(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[OptimizerPlan],
        holders: Mapping[str, Holder],
    ) -> None:
        """Take the numbers of other optimisers, which must be acceptable, and the state that they have."""
        ...


@dataclass(frozen=True)
class HostLayouts:
    """What the host's tensors look like: as programs want them, with an entry per group where they are grouped."""

    strides: Strides
    groupings: Sequence[Grouping]

    def host(self, spec: InputSpec) -> InputSpec:
        """The spec of the tensor that the host has for an input of a program."""
        stride = self.strides.get(spec.name, spec.stride)
        for grouping in self.groupings:
            if grouping.name == spec.owner:
                shape = (grouping.groups, *spec.shape)
                return replace(spec, shape=shape, stride=(math.prod(spec.shape), *stride))
        return replace(spec, stride=stride)


def registered_tensor(module: nn.Module, spec: InputSpec) -> torch.Tensor:
    """The parameter or buffer that a module keeps under a name, of the shape and type that was compiled.

    Running statistics may have another type, which changes as soon as a program gives them back.
    """
    table, attribute = table_of(module, spec)
    tensor = _look_up(table, attribute)
    if (
        tensor is None
        or whereabouts(tensor)
        or tuple(tensor.shape) != spec.shape
        or (tensor.dtype != spec.dtype and not is_widened(module, spec.name, tensor.dtype, spec.dtype))
    ):
        now = "missing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}{whereabouts(tensor)}"
        raise ArgumentError(
            explain(
                f"{spec.role.value} {spec.name} is {now}, but the model was compiled with "
                f"{spec.dtype} of shape {list(spec.shape)}.",
                fix="restore it, or call destroy() and compile again",
            )
        )
    return tensor


def whereabouts(tensor: torch.Tensor) -> str:
    """Where a tensor is, for an error; nothing if a program can work on it, which reads memory and asks nobody."""
    where = "" if tensor.is_cpu else f" on the device {tensor.device}"
    return where if tensor.layout is torch.strided else f"{where} with the layout {tensor.layout}"


def _look_up(table: Any, key: Any) -> Any:
    try:
        return table[key]
    except GONE:
        return None


def table_of(module: nn.Module, spec: InputSpec) -> tuple[Any, str]:
    prefix, _, attribute = spec.name.rpartition(".")
    owner = module.get_submodule(prefix) if prefix else module
    return (owner._parameters if spec.role is Role.PARAMETER else owner._buffers), attribute
