"""Trace the weight update and join it to a traced step, so that one graph holds the whole training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from poptorch.capture.private import FunctionalTensorMode, from_fun, fx_traceback, to_fun
from poptorch.capture.recorder import Recorder
from poptorch.capture.trained import SCALE_FACTOR, TrainedGroup, Update
from poptorch.ir import (
    Direction,
    GraphBuilder,
    InputSpec,
    Note,
    OutputRole,
    OutputSpec,
    Role,
    StepGraph,
    annotation,
    describe,
    fake_mode,
)
from poptorch.optim.gradients import adapt_scale, limit_norm
from poptorch.optim.host_step import HostStep
from poptorch.optim.rules import PLAIN, Hypers, State, kept_as


def join_update(step: StepGraph, update: Update) -> StepGraph:
    """Append the update of every group to a step; it goes on returning the gradients, for passes that need them."""
    parameters = {spec.name: spec for spec in step.signature.inputs if spec.role is Role.PARAMETER}
    traced = _Trace(update, parameters)
    recorded = traced.run()
    ops = recorded.graph
    builder = GraphBuilder()
    builder.inputs(step.inputs)
    builder.copy(step.ops.nodes)
    computed = {(spec.role, spec.name): builder.copies[node] for spec, node in step.outputs}
    gradients = iter([computed[OutputRole.GRADIENT, name] for group in update.groups for name in group.names])
    placeholders = [node for node in ops.nodes if node.op == "placeholder"]
    for spec, node in zip(traced.inputs, placeholders, strict=True):
        if spec is None:
            builder.copies[node] = next(gradients)
        else:  # forward may have changed a parameter already
            changed = computed.get((OutputRole.NEW_VALUE, spec.name))
            builder.copies[node] = changed or builder.node(spec.name) or builder.input(spec)
    constants = {**step.constants, **recorded.add_constants(builder, first=len(step.constants))}
    builder.copy(ops.nodes)
    updated, types = set(traced.results), _accumulation_types(update, parameters)
    for spec, node in step.outputs:
        builder.output(_in_joined_step(spec, updated, types), builder.copies[node])
    for name, node in zip(traced.results, ops.output_node().args[0], strict=True):  # pyright: ignore
        builder.output(OutputSpec(name, OutputRole.NEW_VALUE), builder.copies[node])  # pyright: ignore
    return builder.build(step.name, guards=step.guards, constants=constants, graphs=step.graphs)


def _accumulation_types(update: Update, parameters: dict[str, InputSpec]) -> dict[str, torch.dtype | None]:
    """The type in which an optimiser wants the gradients of each parameter added up."""
    types: dict[str, torch.dtype | None] = {}
    for group in update.groups:
        wanted = update.optimizers[group.optimizer].accum_type
        for name in group.names:
            types[name] = None if wanted is None else kept_as(wanted, parameters[name].dtype)
    return types


def _in_joined_step(spec: OutputSpec, updated: set[str], types: dict[str, torch.dtype | None]) -> OutputSpec:
    if spec.role is OutputRole.NEW_VALUE and spec.name in updated:
        return replace(spec, role=OutputRole.VALUE_BEFORE_UPDATE)
    if spec.role is OutputRole.GRADIENT:
        return replace(spec, accumulated_as=types.get(spec.name))
    return spec


class _Trace:
    """The trace of an update: its inputs (None for a gradient), the names of its results, and its ops."""

    def __init__(self, update: Update, parameters: dict[str, InputSpec]) -> None:
        self._update, self._parameters = update, parameters
        self.inputs: list[InputSpec | None] = list(update.scales)
        for group in update.groups:
            own = [parameters[name] for name in group.names]
            self.inputs += own
            self.inputs += [None] * len(own)
            self.inputs += [spec for layout in group.layouts for spec in layout.values()]
            if group.counts:
                self.inputs.append(group.counter)
            self.inputs += group.hypers
        self.results: list[str] = []

    def run(self) -> Recorder:
        own = iter([self._parameters[name] for group in self._update.groups for name in group.names])
        specs = [spec if spec is not None else next(own) for spec in self.inputs]
        recorder = Recorder(fake_mode())
        annotated = fx_traceback.annotate(annotation(Note(Direction.UPDATE)))
        with torch.inference_mode(False), torch.no_grad(), annotated:
            if self._is_plain:
                recorder.record(self._all, [_without_device(spec) for spec in specs])
            else:
                with fake_mode():
                    recorder.record(self._functional, [describe(spec) for spec in specs])
        return recorder

    @property
    def _is_plain(self) -> bool:
        """Whether nothing in the update asks a tensor for its device; PyTorch computes shapes faster without one."""
        rules = [group.plan.rule for group in self._update.groups]
        return not self._update.adapts_scale and all(type(r) in PLAIN and not r.needs_started for r in rules)

    def _functional(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """The update without in-place ops; our own rules have none, but a user's `step()` is full of them."""
        if not any(isinstance(group.plan.rule, HostStep) for group in self._update.groups):
            return self._all(*flat)
        with FunctionalTensorMode():
            results = self._all(*map(to_fun, flat))
            return [from_fun(result) for result in results]  # pyright: ignore[reportReturnType]

    def _all(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        tensors = iter(flat)
        scales = [next(tensors) for _ in self._update.scales]
        groups = [_Group.take(group, tensors) for group in self._update.groups]
        scaled = [grad for group in groups for grad in group.grads]
        self._prepare(groups, scales)
        results = [result for group in groups for result in group.updated()]
        self.results = [name for name, _, _ in results]
        new = [value.to(old.dtype) for _, value, old in results]
        if not self._update.adapts_scale:
            return new
        largest = torch.finfo(self._update.loss_type).max
        is_usable, factor = adapt_scale(scaled, scales[0], scales[1], largest)
        self.results.append(SCALE_FACTOR.name)
        kept = [torch.where(is_usable, value, old) for value, (_, _, old) in zip(new, results, strict=True)]
        return [*kept, factor]

    def _prepare(self, groups: list[_Group], scales: list[torch.Tensor]) -> None:
        """Take the loss scale out of the gradients, and apply every limit."""
        for group in groups:
            group.widen()
            if scales:
                inverse = 1 / torch.stack(scales).double().prod()
                group.grads = [grad * inverse.to(grad.dtype) for grad in group.grads]
        _replace_gradients(groups, self._update.clipping.apply(_gradients(groups)))
        for index, plan in enumerate(self._update.optimizers):
            own = [group for group in groups if group.group.optimizer == index]
            for group in own:
                group.grads = group.group.plan.rule.penalised(group.params, group.grads, group.hypers)
            _replace_gradients(own, limit_norm(_gradients(own), plan.max_grad_norm) if own else [])


def _without_device(spec: InputSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def _gradients(groups: Sequence[_Group]) -> list[torch.Tensor]:
    return [grad for group in groups for grad in group.grads]


def _replace_gradients(groups: Sequence[_Group], grads: list[torch.Tensor]) -> None:
    remaining = iter(grads)
    for group in groups:
        group.grads = [next(remaining) for _ in group.grads]


@dataclass
class _Group:
    """The tensors of one group while its update is traced."""

    group: TrainedGroup
    given: list[torch.Tensor]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[State]
    given_states: list[State]
    counter: torch.Tensor | None
    hypers: Hypers

    @classmethod
    def take(cls, group: TrainedGroup, tensors: Iterator[torch.Tensor]) -> _Group:
        params = [next(tensors) for _ in group.names]
        grads = [next(tensors) for _ in group.names]
        states = [{key: next(tensors) for key in layout} for layout in group.layouts]
        counter = next(tensors) if group.counts else None
        hypers = {name: next(tensors) for name in group.plan.rule.hypers}
        return cls(group, params, params, grads, states, states, counter, hypers)

    def widen(self) -> None:
        """Take everything in the types that the rule computes in, whatever the types of parameters and state are."""
        wide = self.group.plan.rule.wide
        self.params = [wide(param) for param in self.params]
        self.grads = [wide(grad) for grad in self.grads]
        self.states = [{key: wide(value) for key, value in state.items()} for state in self.states]

    def updated(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The name, the new value and the old value of everything that the rule changes."""
        group, old_counter = self.group, self.counter
        counter = None if old_counter is None else old_counter + 1
        params, states = group.plan.rule.apply(self.params, self.grads, self.states, counter, self.hypers)
        yield from zip(group.names, params, self.given, strict=True)
        for layout, state, given in zip(group.layouts, states, self.given_states, strict=True):
            for key, value in state.items():
                yield layout[key].name, value, given[key]
        if counter is not None and old_counter is not None:
            yield group.counter.name, counter, old_counter
