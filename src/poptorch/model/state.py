"""Find the state of a program in its owners, the user's module and optimiser, and notice when it was replaced there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn

from poptorch.capture import LOSS_SCALING, SCALE_FACTOR, TrainedGroup
from poptorch.errors import ArgumentError, OptimizerStateError, explain
from poptorch.executable import Grouping
from poptorch.ir import InputSpec, Role
from poptorch.model.replacement import check_optimizers
from poptorch.optim.plan import GroupPlan, OptimizerPlan
from poptorch.runtime import with_stride

Strides = Mapping[str, tuple[int, ...]]
_GONE = (KeyError, RuntimeError)  # what tables of modules and optimisers, and those of scripted modules, raise


_is_trainable = attrgetter("requires_grad")


class _Seats:
    """Where owners keep tensors, and which memory those had when they were bound.

    Every call asks whether anything changed: columns can be compared without a line of Python for each tensor.
    """

    def __init__(self) -> None:
        self._tables: list[Any] = []
        self._keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []

    def add(self, table: Any, key: str) -> None:
        tensor = table[key]
        self._tables.append(table)
        self._keys.append(key)
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr())
        if isinstance(tensor, nn.Parameter):
            self._parameters.append(tensor)
            self._trainable.append(tensor.requires_grad)

    def are_unchanged(self) -> bool:
        try:
            return (
                all(map(is_, map(getitem, self._tables, self._keys), self._tensors))
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and list(map(_is_trainable, self._parameters)) == self._trainable
            )
        except _GONE:
            return False


@dataclass(frozen=True)
class _Layouts:
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


class OwnedState:
    """The state of a training program: parameters, buffers, optimiser state and hyper-parameters, by name."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[OptimizerPlan],
        groups: Sequence[TrainedGroup],
        specs: Iterable[InputSpec],
        strides: Strides,
        groupings: Sequence[Grouping] = (),
    ) -> None:
        self._module, self._groups, self._layouts = module, groups, _Layouts(strides, groupings)
        specs = list(specs)
        self._specs = [spec for spec in specs if spec.role in (Role.PARAMETER, Role.BUFFER)]
        self._hypers = {
            group.hyper_name(name): torch.tensor(value, dtype=torch.float64)
            for group in groups
            for name, value in group.plan.values.items()
        }
        for spec in specs:
            if spec == LOSS_SCALING:
                self._hypers[spec.name] = torch.tensor(plans[0].loss_scaling.value)
            elif spec == SCALE_FACTOR:
                self._hypers[spec.name] = torch.ones(())
        self._trainable = {name: p.requires_grad for name, p in module.named_parameters()}
        self._compiled = tuple(plans)
        self.optimizers = tuple(optimizers)
        self._seats = _Seats()
        self._optimizer_states: list[object] = []

    @property
    def scale_factor(self) -> torch.Tensor | None:
        """What automatic loss scaling multiplies the loss scaling with; None without it."""
        return self._hypers.get(SCALE_FACTOR.name)

    @property
    def replica_groups(self) -> dict[str, int]:
        """How many groups of replicas have a value of their own, by the name of the parameter."""
        return {grouping.name: grouping.groups for grouping in self._layouts.groupings}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, in the memory layout that the program expects; remembers where they live."""
        self._seats = _Seats()
        found = dict(self._hypers)
        for spec in self._specs:
            found[spec.name] = self._registered(spec)
        parameters = dict(self._module.named_parameters())
        for group in self._groups:
            found.update(self._optimizer_tensors(group, [parameters[name] for name in group.names]))
        self._optimizer_states = [optimizer.state for optimizer in self.optimizers]
        return found

    def trained_parameters(self, optimizer: int, plan: OptimizerPlan) -> dict[str, tuple[nn.Parameter, GroupPlan]]:
        """The parameters that one optimiser trains, by name, each with the plan of its group."""
        parameters = dict(self._module.named_parameters())
        own = [group for group in self._groups if group.optimizer == optimizer]
        return {name: (parameters[name], plan.groups[group.position]) for group in own for name in group.names}

    def is_unchanged(self) -> bool:
        """Whether every tensor is still the one that was bound; changed contents do not matter."""
        owners = zip(self.optimizers, self._optimizer_states, strict=True)
        return all(optimizer.state is state for optimizer, state in owners) and self._seats.are_unchanged()

    def set_hypers(self, plans: Sequence[OptimizerPlan]) -> None:
        """Take new numbers from optimisers; whatever shapes the program must be as it was compiled."""
        check_optimizers(self._compiled, plans, self._groups)
        for group in self._groups:
            for name, value in plans[group.optimizer].groups[group.position].values.items():
                if group.hyper_name(name) in self._hypers:
                    self._hypers[group.hyper_name(name)].fill_(value)
        if LOSS_SCALING.name in self._hypers:
            self._hypers[LOSS_SCALING.name].fill_(plans[0].loss_scaling.value)

    def adopt(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Go on with other optimiser objects: they take over the state of the old ones where they have none."""
        parameters = dict(self._module.named_parameters())
        for group in self._groups:
            old, new = self.optimizers[group.optimizer], optimizers[group.optimizer]
            for parameter in (parameters[name] for name in group.names):
                if new is not old and not new.state.get(parameter) and old.state.get(parameter):
                    new.state[parameter] = dict(old.state[parameter])
                    old.state[parameter] = {key: _copy(value) for key, value in old.state[parameter].items()}
        self.optimizers = tuple(optimizers)

    def _registered(self, spec: InputSpec) -> torch.Tensor:
        """A parameter or buffer where the module keeps it; a new memory layout is given to the object itself."""
        tensor = registered_tensor(self._module, self._layouts.host(spec))
        table, attribute = _table(self._module, spec)
        stride = self._layouts.host(spec).stride
        if tensor.stride() != stride:
            tensor.data = with_stride(tensor.detach(), stride)
        if tensor.requires_grad != self._trainable.get(spec.name, tensor.requires_grad):
            raise ArgumentError(_froze(spec.name, tensor))
        self._seats.add(table, attribute)
        return tensor

    def _optimizer_tensors(self, group: TrainedGroup, parameters: list[nn.Parameter]) -> dict[str, torch.Tensor]:
        """The optimiser's tensors for one group, created as torch creates them where they do not exist yet."""
        found: dict[str, torch.Tensor] = {}
        rule, state = group.plan.rule, self.optimizers[group.optimizer].state
        counter = torch.zeros(len(parameters))
        for index, (parameter, layout) in enumerate(zip(parameters, group.layouts, strict=True)):
            if not layout and not group.counts:
                continue
            entries = state[parameter]
            missing = [key for key in layout if not isinstance(entries.get(key), torch.Tensor)]
            counter[index] = float(entries["step"]) if "step" in entries else float(not missing)
            if rule.counts_steps:
                entries["step"] = counter[index]  # a view: the program advances all counters of a group at once
                self._seats.add(entries, "step")
            initial = self._initial_state(group, index, parameter) if missing else {}
            for key, spec in layout.items():
                tensor, host = initial[key] if key in missing else entries[key], self._layouts.host(spec)
                if tuple(tensor.shape) != host.shape:
                    raise OptimizerStateError(_misshapen(spec.name, tensor, host))
                entries[key] = with_stride(tensor.to(spec.dtype), host.stride)
                found[spec.name] = entries[key]
                self._seats.add(entries, key)
        if group.counts:
            found[group.counter_name] = counter
        return found

    def _initial_state(self, group: TrainedGroup, index: int, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state that a parameter starts with; if groups of replicas have their own, that of each."""
        rule, values = group.plan.rule, group.plan.values
        if group.names[index] not in self.replica_groups:
            return rule.initial_state(parameter, values)
        parts = [rule.initial_state(part, values) for part in parameter.detach()]
        return {key: torch.stack([part[key] for part in parts]) for key in parts[0]}


def _froze(name: str, parameter: torch.Tensor) -> str:
    now, then = ("requires a gradient", "did not") if parameter.requires_grad else ("requires no gradient", "did")
    return explain(
        f"parameter {name} {now}, but {then} when the model was compiled.",
        reason="which parameters are trained is part of the program",
        fix=f"set {name}.requires_grad back, or call destroy(), which lets the model compile again",
    )


def _misshapen(name: str, tensor: torch.Tensor, wanted: InputSpec) -> str:
    parameter, _, key = name.rpartition(":")
    return explain(
        f"the optimiser has {key} of shape {list(tensor.shape)} for parameter {parameter}, "
        f"which needs {list(wanted.shape)}.",
        reason="a state dictionary of another model was loaded, or the entry was replaced",
        fix="load the state that belongs to this model, or clear the optimiser's state",
    )


class Snapshot:
    """The state of an inference program: copies of parameters and buffers, taken when it is made and on request."""

    def __init__(
        self, module: nn.Module, specs: Iterable[InputSpec], strides: Strides, groupings: Sequence[Grouping] = ()
    ) -> None:
        self._module = module
        layouts = _Layouts(strides, groupings)
        self._specs = [layouts.host(spec) for spec in specs if spec.role in (Role.PARAMETER, Role.BUFFER)]
        self._originals = self._find()
        self._copies = {
            spec.name: with_stride(self._originals[spec.name].detach(), spec.stride, always_copy=True)
            for spec in self._specs
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
        return table[key]
    except _GONE:
        return None


def _table(module: nn.Module, spec: InputSpec) -> tuple[Any, str]:
    prefix, _, attribute = spec.name.rpartition(".")
    owner = module.get_submodule(prefix) if prefix else module
    return (owner._parameters if spec.role is Role.PARAMETER else owner._buffers), attribute


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
