"""Trace the weight update and join it to a traced step, so that one graph holds the whole training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch.errors import OptimizerError, explain
from poptorch.ir import InputSpec, Note, OutputRole, OutputSpec, Phase, Role, Signature, StepGraph, annotation
from poptorch.optim import GroupPlan
from poptorch.optim.rules import State

COUNTER = "counter"


@dataclass(frozen=True)
class TrainedGroup:
    """The parameters of one group that the loss reaches, by name; it owns the names of the group's state inputs."""

    index: int
    plan: GroupPlan
    names: tuple[str, ...]

    @property
    def counts(self) -> bool:
        return self.plan.rule.counts_steps or self.plan.rule.needs_started

    @property
    def counter_name(self) -> str:
        return f"group{self.index}:{COUNTER}"

    def state_name(self, key: str, parameter: str) -> str:
        return f"{parameter}:{key}"

    def hyper_name(self, hyper: str) -> str:
        return f"group{self.index}:{hyper}"


def trained_groups(module: nn.Module, plans: Sequence[GroupPlan], with_gradient: set[str]) -> tuple[TrainedGroup, ...]:
    """Match the optimiser's groups with the parameters of the model that have a gradient."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[TrainedGroup] = []
    for index, plan in enumerate(plans):
        for parameter in plan.params:
            if id(parameter) not in names:
                raise OptimizerError(
                    explain(
                        f"parameter group {index} of the optimiser holds a parameter of shape "
                        f"{list(parameter.shape)} that is not part of the model.",
                        fix="build the optimiser from the parameters of the model that is wrapped",
                    )
                )
        trained = [parameter for parameter in plan.params if names[id(parameter)] in with_gradient]
        groups.append(TrainedGroup(index, plan, tuple(names[id(parameter)] for parameter in trained)))
    return tuple(group for group in groups if group.names)


def join_update(step: StepGraph, groups: Sequence[TrainedGroup]) -> StepGraph:
    """Append the update of every group to a step; it goes on returning the gradients, for passes that need them."""
    parameters = {spec.name: spec for spec in step.signature.inputs if spec.role is Role.PARAMETER}
    specs, results, update = _trace_update(groups, parameters)

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[InputSpec] = []
    nodes: dict[str, fx.Node] = {}

    def add(spec: InputSpec, like: fx.Node) -> None:
        node = graph.placeholder(f"in{len(inputs)}")
        node.meta = dict(like.meta)
        copies[like] = nodes[spec.name] = node
        inputs.append(spec)

    step_inputs = list(zip(step.signature.inputs, step.placeholders, strict=True))
    update_inputs = list(zip(specs, (n for n in update.graph.nodes if n.op == "placeholder"), strict=True))
    for spec, node in step_inputs:
        if spec.role is not Role.USER_INPUT:
            add(spec, node)
    for spec, node in update_inputs:
        if spec is not None and spec.role is not Role.PARAMETER:
            add(spec, node)
    for spec, node in step_inputs:
        if spec.role is Role.USER_INPUT:
            add(spec, node)

    values: list[fx.Node] = list(graph.graph_copy(step.ops, copies))  # pyright: ignore
    by_output = dict(zip(((spec.role, spec.name) for spec in step.signature.outputs), values, strict=True))
    gradients = iter([by_output[OutputRole.GRADIENT, name] for group in groups for name in group.names])
    for spec, node in update_inputs:
        if spec is None:
            copies[node] = next(gradients)
        elif spec.role is Role.PARAMETER:  # forward may have changed it already
            copies[node] = by_output.get((OutputRole.NEW_VALUE, spec.name), nodes[spec.name])
    new_values: list[fx.Node] = list(graph.graph_copy(update.graph, copies))  # pyright: ignore

    updated = set(results)
    outputs = [
        (_before_update(spec) if spec.role is OutputRole.NEW_VALUE and spec.name in updated else spec, value)
        for spec, value in zip(step.signature.outputs, values, strict=True)
    ]
    outputs += [(OutputSpec(n, OutputRole.NEW_VALUE), v) for n, v in zip(results, new_values, strict=True)]
    graph.output(tuple(value for _, value in outputs))
    graph.eliminate_dead_code()
    signature = Signature(tuple(inputs), tuple(spec for spec, _ in outputs))
    return replace(step, ops=graph, signature=signature)


def _before_update(spec: OutputSpec) -> OutputSpec:
    return replace(spec, role=OutputRole.VALUE_BEFORE_UPDATE)


def _trace_update(
    groups: Sequence[TrainedGroup], parameters: dict[str, InputSpec]
) -> tuple[list[InputSpec | None], list[str], fx.GraphModule]:
    """Trace the rules of all groups. Gives the inputs (None for a gradient), the names of the results, and the ops."""
    specs: list[InputSpec | None] = []
    for group in groups:
        rule, own = group.plan.rule, [parameters[name] for name in group.names]
        specs += own
        specs += [None] * len(own)
        for key in rule.state:
            specs += [replace(s, name=group.state_name(key, s.name), role=Role.OPTIMIZER_STATE) for s in own]
        if group.counts:
            specs.append(InputSpec(group.counter_name, Role.OPTIMIZER_STATE, (len(own),), torch.float32, (1,)))
        specs += [InputSpec(group.hyper_name(name), Role.HYPER, (), torch.float64, ()) for name in rule.hypers]

    results: list[str] = []

    def update(*flat: torch.Tensor) -> list[torch.Tensor]:
        tensors, new = iter(flat), list[torch.Tensor]()
        take = lambda count: [next(tensors) for _ in range(count)]  # noqa: E731
        for group in groups:
            rule, count = group.plan.rule, len(group.names)
            params, grads = take(count), take(count)
            state: State = {key: take(count) for key in rule.state}
            counter = next(tensors) + 1 if group.counts else None
            hypers = dict(zip(rule.hypers, take(len(rule.hypers)), strict=True))
            new_params, new_state = rule.update(params, grads, state, counter, hypers)
            results.extend(group.names)
            new.extend(value.to(old.dtype) for value, old in zip(new_params, params, strict=True))
            for key, values in new_state.items():
                results.extend(group.state_name(key, name) for name in group.names)
                new.extend(value.to(old.dtype) for value, old in zip(values, state[key], strict=True))
            if counter is not None:
                results.append(group.counter_name)
                new.append(counter)
        return new

    own_specs = [parameters[name] for group in groups for name in group.names]
    gradient_specs = iter(own_specs)
    with FakeTensorMode(), torch.no_grad(), fx_traceback.preserve_node_meta():
        fakes = [_fake(spec if spec is not None else next(gradient_specs)) for spec in specs]
        with fx_traceback.annotate(annotation(Note(Phase.UPDATE))):
            traced = make_fx(update, tracing_mode="real")(*fakes)
    return specs, results, traced


def _fake(spec: InputSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
