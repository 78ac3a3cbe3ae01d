"""Find the state of a program in its owners, the user's module and optimiser, and notice when it was replaced there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poptorch.capture import TrainedGroup
from poptorch.errors import ArgumentError, OptimizerError, explain
from poptorch.ir import InputSpec, Role
from poptorch.optim import GroupPlan
from poptorch.runtime import with_stride

Strides = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Seat:
    """Where an owner keeps a tensor, and which memory it had when it was bound."""

    table: Any
    key: Any
    tensor: torch.Tensor
    address: int

    def is_unchanged(self) -> bool:
        return _look_up(self.table, self.key) is self.tensor and self.tensor.data_ptr() == self.address


class OwnedState:
    """The state of a training program: parameters, buffers, optimiser state and hyper-parameters, by name."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[TrainedGroup],
        specs: Iterable[InputSpec],
        strides: Strides,
    ) -> None:
        self._module, self._groups, self._strides = module, groups, strides
        self._specs = [spec for spec in specs if spec.role in (Role.PARAMETER, Role.BUFFER)]
        self._hypers = {
            group.hyper_name(name): torch.tensor(value, dtype=torch.float64)
            for group in groups
            for name, value in group.plan.values.items()
        }
        self.optimizer = optimizer
        self._seats: list[_Seat] = []
        self._optimizer_state: object = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, in the memory layout that the program expects; remembers where they live."""
        self._seats = []
        found = dict(self._hypers)
        for spec in self._specs:
            found[spec.name] = self._registered(spec)
        parameters = dict(self._module.named_parameters())
        for group in self._groups:
            found.update(self._optimizer_tensors(group, [parameters[name] for name in group.names]))
        self._optimizer_state = self.optimizer.state
        return found

    def is_unchanged(self) -> bool:
        """Whether every tensor is still the one that was bound; changed contents do not matter."""
        return self.optimizer.state is self._optimizer_state and all(seat.is_unchanged() for seat in self._seats)

    def set_hypers(self, plans: Sequence[GroupPlan]) -> None:
        """Take new numbers from an optimiser; whatever shapes the program must be as it was compiled."""
        for group in self._groups:
            if group.index >= len(plans):
                raise OptimizerError(
                    f"the optimiser has {len(plans)} parameter groups, but group {group.index} was compiled."
                )
            plan = plans[group.index]
            if plan.rule != group.plan.rule:
                raise OptimizerError(
                    explain(
                        f"parameter group {group.index} of the optimiser follows another rule than the program.",
                        compiled=str(group.plan.rule),
                        now=str(plan.rule),
                        fix="keep the kind of optimiser and which of its settings are zero, or call destroy() first",
                    )
                )
        for group in self._groups:
            for name, value in plans[group.index].values.items():
                self._hypers[group.hyper_name(name)].fill_(value)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with another optimiser object: it inherits the state of the old one where it has none itself."""
        parameters = dict(self._module.named_parameters())
        for group in self._groups:
            for name in group.names:
                parameter = parameters[name]
                if not optimizer.state.get(parameter) and self.optimizer.state.get(parameter):
                    optimizer.state[parameter] = dict(self.optimizer.state[parameter])
        self.optimizer = optimizer

    def _registered(self, spec: InputSpec) -> torch.Tensor:
        """A parameter or buffer where the module keeps it; a new memory layout is given to the object itself."""
        tensor = registered_tensor(self._module, spec)
        table, attribute = _table(self._module, spec)
        stride = self._strides.get(spec.name, spec.stride)
        if tensor.stride() != stride:
            tensor.data = with_stride(tensor.detach(), stride)
        self._seats.append(_Seat(table, attribute, tensor, tensor.data_ptr()))
        return tensor

    def _optimizer_tensors(self, group: TrainedGroup, parameters: list[nn.Parameter]) -> dict[str, torch.Tensor]:
        """The optimiser's tensors for one group, created as torch creates them where they do not exist yet."""
        found: dict[str, torch.Tensor] = {}
        rule = group.plan.rule
        if not rule.state and not group.counts:
            return found
        counter = torch.zeros(len(parameters))
        for index, (name, parameter) in enumerate(zip(group.names, parameters, strict=True)):
            entries = self.optimizer.state[parameter]
            has_state = all(entries.get(key) is not None for key in rule.state)
            counter[index] = float(entries["step"]) if "step" in entries else float(has_state)
            if rule.counts_steps:
                entries["step"] = counter[index]  # a view: the program advances all counters of a group at once
                self._sit(entries, "step")
            for key in rule.state:
                stride = self._strides.get(group.state_name(key, name), parameter.stride())
                entries[key] = _state_tensor(entries.get(key), parameter, stride)
                found[group.state_name(key, name)] = entries[key]
                self._sit(entries, key)
        if group.counts:
            found[group.counter_name] = counter
        return found

    def _sit(self, table: Any, key: str) -> None:
        self._seats.append(_Seat(table, key, table[key], table[key].data_ptr()))


class Snapshot:
    """The state of an inference program: copies of parameters and buffers, taken when it is made and on request."""

    def __init__(self, module: nn.Module, specs: Iterable[InputSpec], strides: Strides) -> None:
        self._module = module
        self._specs = [spec for spec in specs if spec.role in (Role.PARAMETER, Role.BUFFER)]
        self._originals = self._find()
        self._copies = {
            name: with_stride(tensor.detach(), strides.get(name, tensor.stride()), always_copy=True)
            for name, tensor in self._originals.items()
        }
        self._versions = self._host_versions()
        self.seen: list[int] = []  # the times of the training executors whose work the copies show

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._copies

    def is_current(self) -> bool:
        """Whether the host has not written to a parameter or buffer since the copies were made."""
        return self._versions == self._host_versions()

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Take the values that the module has now, of all parameters and buffers or only of these."""
        self._originals = self._find()
        for name, copy in self._copies.items():
            if names is None or name in names:
                copy.copy_(self._originals[name].detach())
        self._versions = self._host_versions()

    def write_back(self, names: Iterable[str]) -> None:
        """Give the module the values that the program has computed for its buffers."""
        with torch.no_grad():
            for name in names:
                self._originals[name].copy_(self._copies[name])
        self._versions = self._host_versions()

    def _host_versions(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in self._originals.values()]

    def _find(self) -> dict[str, torch.Tensor]:
        return {spec.name: registered_tensor(self._module, spec) for spec in self._specs}


def registered_tensor(module: nn.Module, spec: InputSpec) -> torch.Tensor:
    """The parameter or buffer that a module keeps under a name, of the shape and type that was compiled."""
    table, attribute = _table(module, spec)
    tensor = _look_up(table, attribute)
    if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        now = "missing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise ArgumentError(
            explain(
                f"{spec.role.value} {spec.name} is {now}, but the model was compiled with "
                f"{spec.dtype} of shape {list(spec.shape)}.",
                fix="restore it, or call destroy() and compile again",
            )
        )
    return tensor


def _look_up(table: Any, key: Any) -> Any:
    try:
        return table[key]  # the tables of scripted modules have no get
    except (KeyError, RuntimeError):
        return None


def _table(module: nn.Module, spec: InputSpec) -> tuple[Any, str]:
    prefix, _, attribute = spec.name.rpartition(".")
    owner = module.get_submodule(prefix) if prefix else module
    return (owner._parameters if spec.role is Role.PARAMETER else owner._buffers), attribute


def _state_tensor(existing: torch.Tensor | None, parameter: nn.Parameter, stride: tuple[int, ...]) -> torch.Tensor:
    if existing is None:
        return torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype).zero_()
    return with_stride(existing.to(parameter.dtype), stride)
