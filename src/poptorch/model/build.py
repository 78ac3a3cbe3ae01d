"""Make a compiled variant of a model: capture, compile, load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from poptorch._logging import warn_once
from poptorch.capture import Call, Captured
from poptorch.compiler import Surroundings, compile_graph, dumping, show_captured
from poptorch.engines import EagerEngine, Engine, TieredEngine
from poptorch.executable import Executable, GroupBinding, Interface
from poptorch.model.arguments import CallSpec
from poptorch.model.buffers import check_broadcast
from poptorch.model.display import Display, displaying
from poptorch.model.garbage import collecting_later
from poptorch.model.grouping import plan_groupings, run_on_one_group
from poptorch.model.hooks import compile_hooks
from poptorch.model.kernels import PHASE, Task
from poptorch.model.loading import Loaded
from poptorch.model.locking import COMPILING
from poptorch.model.materialise import materialise
from poptorch.model.modes import Flags, ModuleWatch, flags_of, run_with_flags
from poptorch.model.optimizers import OptimizerSet, is_number
from poptorch.model.owned_state import OwnedState
from poptorch.model.program_state import ProgramState, Strides, strides_of
from poptorch.model.snapshot import Snapshot
from poptorch.model.tiers import Made, begin
from poptorch.model.variants import Variant
from poptorch.ops.collectives import running_on
from poptorch.options import Settings
from poptorch.runtime import Seat, Session
from poptorch.store import Cache, cache_folder, read_kernels
from poptorch.store.files import programs_digest


@dataclass(frozen=True)
class Blueprint:
    """What every variant of a model is made from."""

    module: nn.Module
    settings: Settings
    engine: Engine
    optimizers: OptimizerSet
    replica_groups: Mapping[str, tuple[Any, ...]]
    scale_factor: torch.Tensor  # of automatic loss scaling, the same for all variants
    warned: set[str]
    seat: Seat  # which process this is, and its connections to others if a step exchanges anything with them


def build(
    blueprint: Blueprint,
    call: CallSpec,
    tensors: list[torch.Tensor],
    flags: Flags,
    reason: str,
    *,
    before: Variant | None,
    placed: Callable[[Executable], None],
) -> Variant:
    """A variant for a kind of call, of which `tensors` are an example, and a mode; it goes on where `before` stands.

    `placed` is told about the executable before native code is made for it, and may raise.
    """
    start = time.perf_counter()
    settings, module = blueprint.settings, blueprint.module
    watch = ModuleWatch(module)
    with COMPILING, displaying(_shows_progress(settings)) as display:
        with collecting_later():
            captured, executable, observe = _lower(blueprint, call, tensors, flags, display)
        placed(executable)
        display.phase(PHASE)
        made = _compile(blueprint, executable, observe, display)
        with made.in_use():
            check_broadcast(settings, module, executable)
            display.phase("Loading")
            materialise(module, executable, training=settings.is_training)
            state = _own(blueprint, captured, executable, strides_of(made.kernels))
            if before is not None:
                state.take_over(before.state)
            session = Session(executable, made.kernels, state.tensors(), blueprint.seat)
            state.confirm()
            if before is not None:
                session.random.go_on_from(before.session.random)
    seconds = time.perf_counter() - start
    return Variant(call, flags, watch, session, state, reason, seconds, made.engine, made.upgrade)


def _lower(
    blueprint: Blueprint, call: CallSpec, tensors: list[torch.Tensor], flags: Flags, display: Display
) -> tuple[Captured, Executable, Callable[..., None]]:
    """Capture the model, bring what was captured to its final form, and give what observes the passes."""
    settings, module = blueprint.settings, blueprint.module
    display.phase("Capturing the model")
    parameters = dict(module.named_parameters())
    groupings = plan_groupings(parameters, blueprint.replica_groups, settings)

    def capture() -> Captured:
        return run_with_flags(module, flags, lambda: _capture(blueprint, call, tensors))

    with compile_hooks():
        captured = run_on_one_group(parameters, groupings, capture)
    show_captured(captured.graph)
    display.phase("Optimising the graph")
    observe = dumping("training" if settings.is_training else "inference")
    around = Surroundings(
        Interface(call, captured.result, tuple(spec.name for spec in captured.graph.signature.user_inputs)),
        _bindings(captured),
        groupings,
    )
    return captured, compile_graph(captured.graph, around, _without_numbers(settings), observe), observe


def build_loaded(blueprint: Blueprint, loaded: Loaded) -> Variant:
    """A variant from a program that was read from a file, on the state of a model that it belongs to."""
    start = time.perf_counter()
    executable, module = loaded.executable, blueprint.module
    watch = ModuleWatch(module)
    with COMPILING, displaying(_shows_progress(blueprint.settings)) as display:
        display.phase(PHASE)
        made = _find_kernels(blueprint, loaded, display)
        with made.in_use():
            display.phase("Loading")
            groups = loaded.trained_groups(module, blueprint.optimizers.plans)
            graph, result = executable.step.graph, executable.interface.result
            captured = Captured(graph, result, groups, loaded.loss_type, loaded.reached)
            state = _own(blueprint, captured, executable, strides_of(made.kernels))
            session = Session(executable, made.kernels, state.tensors(), blueprint.seat)
            state.confirm()
            if loaded.random is not None:
                session.random.state = loaded.random
    call = CallSpec.like(executable.interface.arguments)
    flags = loaded.flags if len(loaded.flags) == len(flags_of(module)) else flags_of(module)
    reason, seconds = f"read from {loaded.path}", time.perf_counter() - start
    return Variant(call, flags, watch, session, state, reason, seconds, made.engine, made.upgrade)


def _find_kernels(blueprint: Blueprint, loaded: Loaded, display: Display) -> Made:
    """Kernels from the native code in a file, if this user made it here or trusts it; otherwise they are compiled."""
    executable, observe = loaded.executable, dumping("loaded")
    engine = blueprint.engine.later if isinstance(blueprint.engine, TieredEngine) else blueprint.engine
    if engine.name == "inductor":
        found = read_kernels(loaded.container, programs_digest(executable), trusted=loaded.trusts_code)
        if found is not None:
            once = [program for program in executable.programs if program is executable.prepare]
            return Made({**found, **EagerEngine().compile(once, observe)}, engine.name)
    return _compile(blueprint, executable, observe, display)


def _capture(blueprint: Blueprint, call: CallSpec, tensors: list[torch.Tensor]) -> Captured:
    from poptorch.capture.record import capture_inference, capture_training  # takes a second, so only when needed

    module, settings = blueprint.module, blueprint.settings
    examples: list[torch.Tensor] = []
    for name, tensor in zip(call.tensor_names, tensors, strict=True):
        rows = settings.batching.rows_per_micro_batch(name, tuple(tensor.shape))
        examples.append(tensor.narrow(0, 0, rows) if tensor.dim() else tensor)
    registered = dict(module.named_parameters()) | dict(module.named_buffers())
    example = Call(call.args, call.kwargs, call.tensor_names, tuple(examples), frozenset(registered))
    with running_on(settings.batching.replicas):
        if settings.is_training:
            return capture_training(module, example, blueprint.optimizers.plans, settings)
        return capture_inference(module, example, settings)


def _bindings(captured: Captured) -> tuple[GroupBinding, ...]:
    """Which parameters each group trains, without the optimisers themselves."""
    return tuple(
        GroupBinding(group.index, group.optimizer, group.position, group.names, str(group.plan.rule))
        for group in captured.groups
    )


def _without_numbers(settings: Settings) -> Settings:
    """The settings without anchors of numbers that optimisers have, and no program computes."""
    anchored = tuple(pair for pair in settings.report.anchored if not is_number(pair[1].long_name))
    return replace(settings, report=replace(settings.report, anchored=anchored))


def _compile(blueprint: Blueprint, executable: Executable, observe: Callable[..., None], display: Display) -> Made:
    """Kernels for all programs; one that runs once per set of weights is not worth native code."""
    checks = blueprint.settings.precision.floating_point_checks
    once = [program for program in executable.programs if program is executable.prepare and not checks]
    often = [program for program in executable.programs if program not in once]
    settings, engine = blueprint.settings, blueprint.engine
    task = Task(executable, often, find_cache(settings), observe, _shows_progress(settings))
    if isinstance(engine, TieredEngine) and blueprint.seat.is_connected:
        engine = engine.later  # processes would change the engine at different times, and their weights drift apart
    if isinstance(engine, TieredEngine):
        made = begin(engine, task, display)
    else:
        kernels = task.compile(engine, display)
        made = Made(kernels, engine.name)  # which may have become another one on the way
    return replace(made, kernels={**made.kernels, **EagerEngine().compile(once, observe)})


def _shows_progress(settings: Settings) -> bool:
    """Whether this process tells how a compilation goes on: of several, the first does."""
    return settings.report.show_progress and settings.processes.index == 0


def find_cache(settings: Settings) -> Cache | None:
    """The cache that the options ask for; None without one, and where there is no folder for it."""
    if not settings.files.caches:
        return None
    try:
        return Cache(cache_folder(settings.files.cache))
    except OSError as error:
        warn_once(f"compiled programs are not kept for the next time: {error}.")
        return None


def _own(blueprint: Blueprint, captured: Captured, executable: Executable, strides: Strides) -> ProgramState:
    if not blueprint.settings.is_training:
        return Snapshot(blueprint.module, executable, strides, blueprint.warned)
    optimizers = blueprint.optimizers
    return OwnedState(
        blueprint.module, optimizers.optimizers, optimizers.plans, captured, executable, strides, blueprint.scale_factor
    )
