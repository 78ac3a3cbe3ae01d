"""The state of a training program: the module's and the optimisers' own tensors, which it changes in place."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.capture import LOSS_SCALING, SCALE_FACTOR, Captured, Holder, TrainedGroup, holders_of
from poptorch.errors import ArgumentError, OptimizerStateError, explain
from poptorch.executable import Executable, Share
from poptorch.ir import InputSpec, Role, with_stride
from poptorch.model.clock import clocks_of
from poptorch.model.modes import ModuleWatch, replaced_error
from poptorch.model.optimizers import OptimizerSet
from poptorch.model.own_rows import OwnRows, misshapen
from poptorch.model.program_state import (
    HostLayouts,
    ProgramState,
    Rows,
    Strides,
    registered_tensor,
    table_of,
    whereabouts,
)
from poptorch.model.replacement import check_optimizers, fits
from poptorch.model.seats import Seats
from poptorch.optim.gradients import check_scaling
from poptorch.optim.plan import GroupPlan, OptimizerPlan
from poptorch.options import Settings
from poptorch.processes import Team

_STATE = attrgetter("state")


class OwnedState:
    """The state of a training program: parameters, buffers, optimiser state and hyper-parameters, by name."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[OptimizerPlan],
        captured: Captured,
        executable: Executable,
        strides: Strides,
        scale_factor: torch.Tensor,
    ) -> None:
        self._module, self._groups = module, captured.groups
        self._layouts = HostLayouts(strides, executable.binding.groupings)
        self._loss_type, self._reached = captured.loss_type, captured.reached
        self._specs = [spec for spec in executable.state if spec.role in (Role.PARAMETER, Role.BUFFER)]
        self._here = {spec.name for spec in self._specs}  # other processes may have other stages
        self._rows = OwnRows({shard.name: shard for shard in executable.binding.shards})
        self._hypers = {
            spec.name: torch.tensor(group.plan.values[spec.key], dtype=torch.float64)
            for group in captured.groups
            for spec in group.hypers
        }
        for spec in executable.state:
            if spec == LOSS_SCALING:
                self._hypers[spec.name] = torch.tensor(plans[0].loss_scaling.value)
            elif spec == SCALE_FACTOR:
                self._hypers[spec.name] = scale_factor
        self._trainable = _trainable(module)
        self._compiled = tuple(plans)
        self._optimizers = tuple(optimizers)
        self._holders: Mapping[str, Holder] = holders_of(module, plans)
        self._clocks = clocks_of(module.parameters())
        self._seats = Seats()
        self._optimizer_states: list[object] = []
        self._is_bound = False  # whether a session works on the tensors in the seats
        self._fresh: list[torch.Tensor] = []  # state that was made here, and that no update has seen yet

    @property
    def _replica_groups(self) -> dict[str, int]:
        """How many groups of replicas have a value of their own, by the name of the parameter."""
        return {grouping.name: grouping.groups for grouping in self._layouts.groupings}

    @property
    def trained(self) -> tuple[TrainedGroup, ...]:
        """What the program trains, each group with the place that it has in the optimisers now."""
        holders = [self._holders[group.names[0]] for group in self._groups]
        return tuple(
            replace(group, optimizer=holder.optimizer, position=holder.position, plan=holder.plan)
            for group, holder in zip(self._groups, holders, strict=True)
        )

    @property
    def loss_type(self) -> torch.dtype:
        return self._loss_type

    @property
    def reached(self) -> frozenset[str]:
        """The parameters that the loss has a gradient for, trained or not."""
        return self._reached

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, in the memory layout that the program expects; remembers where they live.

        They count as new until `confirm` tells that a session works on them.
        """
        self._is_bound = False
        self._seats = Seats()
        found = dict(self._hypers)
        for spec in self._specs:
            found[spec.name] = self._registered(spec)
        parameters = dict(self._module.named_parameters())
        for group in self._groups:
            own = [parameters[name] for name in group.names]
            for name, parameter in zip(group.names, own, strict=True):
                if parameter is not self._holders[name].parameter:
                    raise ArgumentError(_exchanged(name))
            found.update(self._optimizer_tensors(group, own))
        self._optimizer_states = [optimizer.state for optimizer in self._optimizers]
        for optimizer in self._optimizers:
            self._seats.watch(optimizer.state)
        return found

    def confirm(self) -> None:
        """A session works on the tensors that were handed out last."""
        self._is_bound = True

    def lay_out(self, strides: Strides) -> None:
        self._layouts = replace(self._layouts, strides=strides)

    def _trained_parameters(
        self, optimizer: int, holders: Mapping[str, Holder]
    ) -> dict[str, tuple[nn.Parameter, GroupPlan]]:
        """The parameters that the program trains and one optimiser holds, by name, each with the plan of its group."""
        held = {name: holders[name] for group in self._groups for name in group.names if name in holders}
        return {name: (each.parameter, each.plan) for name, each in held.items() if each.optimizer == optimizer}

    def has_changed(self, watch: ModuleWatch) -> bool:
        """Whether a tensor is not the one that was bound; changed contents do not matter."""
        if replaced := watch.replaced():
            raise ArgumentError(replaced_error(replaced))
        return not (
            self._is_bound
            and all(map(is_, map(_STATE, self._optimizers), self._optimizer_states))
            and self._seats.are_unchanged()
        )

    def begin_call(self) -> None:
        """Tell inference models that weights change: before they do and after, whatever happens in between."""
        for clock in self._clocks:
            clock.time += 1

    def end_call(self) -> None:
        self._fresh.clear()
        self.begin_call()

    def refresh(self, watch: ModuleWatch, names: Collection[str] | None = None) -> None:
        """The program works on the owners' tensors themselves."""

    def take_over(self, before: ProgramState) -> None:
        """All programs work on the same tensors."""
        if isinstance(before, OwnedState):
            self._rows, self._fresh = before._rows, before._fresh

    is_host_stale = False

    def _shared_out(self) -> Iterator[tuple[TrainedGroup, int, InputSpec]]:
        """The state of which this process has some rows: whose it is, and what all rows together look like."""
        for group in self._groups:
            for index, layout in enumerate(group.layouts):
                for spec in layout.values():
                    if self._rows.shard(spec) is not None:
                        yield group, index, self._layouts.host(spec)

    @property
    def has_rows_only(self) -> bool:
        """Whether other processes have state of which the optimisers here show no values."""
        return any(self._rows.are_shown(spec, self._entries(g, i).get(spec.key)) for g, i, spec in self._shared_out())

    @property
    def rows(self) -> list[Rows]:
        """What this process has of the optimisers' state that is shared out over processes."""
        found: list[Rows] = []
        for group, index, spec in self._shared_out():
            shard, parameter = self._rows.shard(spec), self._holders[group.names[index]].parameter
            assert shard is not None
            found.append(Rows(parameter, spec, self._rows.rows(spec), len(shard.bounds) - 1))
        return found

    def begin_alike(self, group: Team) -> None:
        """Let all processes have their rows of what the optimisers of the first one have."""
        for trained, index, spec in self._shared_out():
            parameter = self._holders[trained.names[index]].parameter
            make = partial(self._initial_entry, trained, index, parameter, spec.key)
            self._rows.begin_alike(spec, group, make)
        self._rows.have_begun()

    def bring_rows_together(self, group: Team) -> None:
        """Give the optimisers all rows, until a session is bound next; all processes must do so."""
        for trained, index, spec in self._shared_out():
            self._entries(trained, index)[spec.key] = self._rows.whole(spec, group)

    def _entries(self, group: TrainedGroup, index: int) -> dict[str, Any]:
        return self._optimizer(group).state.setdefault(self._holders[group.names[index]].parameter, {})

    def _initial_entry(self, group: TrainedGroup, index: int, parameter: torch.Tensor, key: str) -> torch.Tensor:
        return self._initial_state(group, index, parameter, [key])[key]

    def fetch_optimizer(self, share: Share, group: Team) -> None:
        """The state for parameters of other processes goes away again when a session is bound next."""
        homes = {home.spec.name: home.process for home in share.homes}
        for trained in self._groups:
            state, counts = self._optimizer(trained).state, trained.plan.rule.counts_steps
            for name, layout in zip(trained.names, trained.layouts, strict=True):
                entries = state.setdefault(self._holders[name].parameter, {})
                if name not in self._here:
                    entries.update({"step": torch.zeros(())} if counts else {})
                    hosts = {key: self._layouts.host(spec) for key, spec in layout.items()}
                    empty = {k: torch.empty_strided(s.shape, s.stride, dtype=s.dtype) for k, s in hosts.items()}
                    entries.update(empty)
                keys = [*(["step"] if counts else []), *layout]
                group.spread([entries[key] for key in keys], homes[name])

    def connect(self, optimizers: OptimizerSet, holders: Mapping[str, Holder], settings: Settings) -> None:
        trained = [self._trained_parameters(index, holders) for index in range(len(optimizers.optimizers))]
        optimizers.connect(trained, self._hypers.get(SCALE_FACTOR.name), self._replica_groups, settings)

    def write_back(self) -> None:
        """The module has the tensors that the program works on."""

    def accepts(self, plans: Sequence[OptimizerPlan], holders: Mapping[str, Holder]) -> bool:
        """Whether the program can go on with these optimisers; if not, the model has to be compiled again.

        Raises for what a new optimiser cannot change at all.
        """
        check_optimizers(self._compiled, plans, self._groups, holders)
        if LOSS_SCALING.name in self._hypers:
            check_scaling(plans[0].loss_scaling.value, self._loss_type)
        trained = {name for group in self._groups for name in group.names}
        trainable = _trainable(self._module)
        return (
            trainable == self._trainable and (holders.keys() & self._reached) <= trained and fits(self._groups, holders)
        )

    def go_on_with(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[OptimizerPlan],
        holders: Mapping[str, Holder],
    ) -> None:
        """Take the numbers of other optimisers, which must be acceptable, and the state that they have."""
        self._optimizers, self._holders = tuple(optimizers), holders
        for group in self._groups:
            values = self._holders[group.names[0]].plan.values
            for spec in group.hypers:
                self._hypers[spec.name].fill_(values[spec.key])
        if LOSS_SCALING.name in self._hypers:
            self._hypers[LOSS_SCALING.name].fill_(plans[0].loss_scaling.value)

    def _registered(self, spec: InputSpec) -> torch.Tensor:
        """A parameter or buffer where the module keeps it; a new memory layout is given to the object itself."""
        tensor = registered_tensor(self._module, self._layouts.host(spec))
        if tensor.dtype != spec.dtype:
            logger.info("%s is %s from now on, where it cannot overflow", spec.name, spec.dtype)
            tensor.data = tensor.to(spec.dtype)
        table, attribute = table_of(self._module, spec)
        stride = self._layouts.host(spec).stride
        if tensor.stride() != stride or tensor.is_conj() or tensor.is_neg():
            tensor.data = with_stride(tensor.detach(), stride, always_copy=True)
        if tensor.requires_grad != self._trainable.get(spec.name, tensor.requires_grad):
            raise ArgumentError(_froze(spec.name, tensor))
        self._seats.add(table, attribute)
        return tensor

    def _optimizer_tensors(self, group: TrainedGroup, parameters: list[nn.Parameter]) -> dict[str, torch.Tensor]:
        """The optimiser's tensors for one group, created as torch creates them where they do not exist yet."""
        found: dict[str, torch.Tensor] = {}
        rule, state = group.plan.rule, self._optimizer(group).state
        counter = torch.zeros(len(parameters))
        for index, (parameter, layout) in enumerate(zip(parameters, group.layouts, strict=True)):
            if not layout and not group.counts:
                continue
            if group.names[index] not in self._here:
                state.pop(parameter, None)
                continue
            entries = state.setdefault(parameter, {})
            fresh = [id(tensor) for tensor in self._fresh]
            has_started = all(entries.get(key) is not None and id(entries[key]) not in fresh for key in layout)
            found.update(self._own_rows(group, index, parameter, entries))
            layout = {key: spec for key, spec in layout.items() if spec.name not in found}
            known = {key: tensor for key in layout if (tensor := _as_tensor(entries.get(key))) is not None}
            missing = [key for key in layout if key not in known]
            if rule.counts_steps:
                counter[index] = float(entries.get("step", 0))
                entries["step"] = counter[index]  # a view: the program advances all counters of a group at once
                self._seats.add(entries, "step")
            else:
                counter[index] = float(has_started)
            if missing:
                known.update(self._initial_state(group, index, parameter, missing))
            for key, spec in layout.items():
                tensor, host = known[key], self._layouts.host(spec)
                if tuple(tensor.shape) != host.shape or whereabouts(tensor):
                    raise OptimizerStateError(misshapen(tensor, host))
                entries[key] = with_stride(tensor.to(spec.dtype), host.stride)
                found[spec.name] = entries[key]
                self._seats.add(entries, key)
            if not has_started:
                self._fresh += [entries[key] for key in group.layouts[index]]
        if group.counts:
            found[group.counter.name] = counter
        return found

    def _own_rows(
        self, group: TrainedGroup, index: int, parameter: torch.Tensor, entries: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """What this process has of a state whose rows are shared out; the optimiser only shows that there is such."""
        found: dict[str, torch.Tensor] = {}
        for key, spec in group.layouts[index].items():
            shard, host = self._rows.shard(spec), self._layouts.host(spec)
            if shard is None:
                continue
            make = partial(self._initial_entry, group, index, parameter.detach()[shard.rows], key)
            self._rows.take(host, shard, _as_tensor(entries.get(key)), make)
            entries[key] = self._rows.shown(host)
            found[spec.name] = self._rows.rows(host)
            self._seats.add(entries, key)
        return found

    def _initial_state(
        self, group: TrainedGroup, index: int, parameter: torch.Tensor, missing: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """The missing entries as a parameter starts with them; if groups of replicas have their own, those of each."""
        name = group.names[index]
        rule, values = self._holders[name].plan.rule, self._holders[name].plan.values
        is_grouped = name in self._replica_groups
        try:
            parts = [rule.initial_state(part, values) for part in (parameter.detach() if is_grouped else [parameter])]
            found = {
                key: torch.stack([part[key] for part in parts]) if is_grouped else parts[0][key] for key in missing
            }
        except Exception as error:  # a step() that does not make its state by itself
            raise OptimizerStateError(_gone(type(self._optimizer(group)).__name__, missing, name)) from error
        return found

    def _optimizer(self, group: TrainedGroup) -> torch.optim.Optimizer:
        return self._optimizers[self._holders[group.names[0]].optimizer]


def _trainable(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def _froze(name: str, parameter: torch.Tensor) -> str:
    now, then = ("requires a gradient", "did not") if parameter.requires_grad else ("requires no gradient", "did")
    return explain(
        f"parameter {name} {now}, but {then} when the model was compiled.",
        reason="which parameters are trained is part of the program",
        fix=f"set {name}.requires_grad back, or call setOptimizer, which lets the model compile again",
    )


def _exchanged(name: str) -> str:
    return explain(
        f"parameter {name} was replaced by another one, which the optimiser does not hold: it would not be trained.",
        fix=f"change the contents of the old one ({name}.data = ...), or build a new optimiser and call setOptimizer",
    )


def _gone(optimizer: str, missing: Sequence[str], name: str) -> str:
    return explain(
        f"the optimiser {optimizer} has no {', '.join(missing)} for parameter {name}.",
        reason="the state was removed, and step() does not make it anew",
        fix="put it back, load a state dictionary, or build the optimiser again and hand it to setOptimizer",
    )


def _as_tensor(value: Any) -> torch.Tensor | None:
    """An entry of an optimiser's state; one that is counted in Python is kept as a tensor from now on."""
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value))
    return value if isinstance(value, torch.Tensor) else None
