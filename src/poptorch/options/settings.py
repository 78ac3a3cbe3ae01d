"""`Settings`: what everything behind the executor reads instead of `Options`, resolved once and immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poptorch import environment
from poptorch.autocasting import Policy
from poptorch.enums import (
    ConnectionType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from poptorch.options.batching import BatchPlan
from poptorch.options.distributed import DistributedOptions, place_of_data
from poptorch.options.locations import TensorLocationOptions
from poptorch.options.options import Anchor, Options
from poptorch.options.placing import StrategyPlan


@dataclass(frozen=True)
class TrainingSettings:
    """How gradients become an update."""

    reduction: ReductionType
    mean_reduction: MeanReductionStrategy
    automatic_loss_scaling: bool
    clip_norm: tuple[float, float] | None  # the limit, and the kind of norm
    clip_value: float | None
    recomputation: int | None  # one of popart.RecomputationType; None: the strategy decides


@dataclass(frozen=True)
class PrecisionSettings:
    """In which types a model computes."""

    half_float_casting: HalfFloatCastingBehavior
    autocasting: Policy | None  # None: switched off
    floating_point_checks: bool
    rounds_at_random: bool  # to float16, instead of to the nearest
    widens_statistics: bool  # the running ones of float16 norm layers, to float32


@dataclass(frozen=True)
class PlacementSettings:
    """Which IPUs a model gets, and how it is spread over them."""

    strategy: StrategyPlan
    connection: ConnectionType
    uses_ipu_model: bool | None  # None: not said
    first_ipu: int | None
    rounds_up: bool  # the number of IPUs, to a power of two
    broadcasts_buffers: bool
    runs_stages: bool  # each by itself, as the schedule says, instead of the whole step at once
    io_tiles: int = 0  # of each IPU, for transfers only


@dataclass(frozen=True)
class ShardingSettings:
    """From how many elements on processes share out the rows of a parameter; None: they do not."""

    optimizer: int | None = None  # each process keeps the optimiser's state for its rows only
    weights: int | None = None  # the weights as well, while they are not used


@dataclass(frozen=True)
class ProcessSettings:
    """Which of several processes this is, and how they add up their gradients.

    Processes that share replicas have one index and are counted once; in each replica, this one has a `part` of `parts`
    of the IPUs.
    """

    index: int
    count: int
    in_order: bool = False  # as one process with all replicas would, bit for bit
    part: int = 0
    parts: int = 1
    sharding: ShardingSettings = ShardingSettings()

    @property
    def shares_rows(self) -> bool:
        """Whether processes are to share out the rows of large parameters."""
        return self.count > 1 and self.sharding != ShardingSettings()

    @property
    def rank(self) -> int:
        """The index among all processes of the program."""
        return self.index * self.parts + self.part


@dataclass(frozen=True)
class FileSettings:
    """What is kept on disk."""

    caches: bool
    cache: str | None  # the folder; None: that of the platform


@dataclass(frozen=True)
class ReportSettings:
    """What is told about a model and its calls."""

    anchored: tuple[tuple[str, Anchor], ...]
    module_namescope: bool
    show_progress: bool
    counts_cycles: bool
    repeats: int  # of the same line in the log

    @property
    def anchors(self) -> dict[str, Anchor]:
        """The tensors that every call collects beside the outputs, by the user's names for them."""
        return dict(self.anchored)


@dataclass(frozen=True)
class EngineSettings:
    """What runs a program, and on what."""

    name: str | None  # None: the environment or the machine decides
    random_seed: int | None
    synthetic_data: int  # one of popart.SyntheticDataMode
    allows_shape_changes: bool
    side_by_side: bool | None  # micro-batches of an update in one program; None: the compiler decides
    updatable_buffers: tuple[str, ...] | None


@dataclass(frozen=True)
class Settings:
    """All options of one kind of model, with every default filled in."""

    is_training: bool
    batching: BatchPlan
    training: TrainingSettings
    precision: PrecisionSettings
    placement: PlacementSettings
    processes: ProcessSettings
    files: FileSettings
    report: ReportSettings
    engine: EngineSettings


def resolve(options: Options, *, training: bool) -> Settings:
    """Turn options into settings for one kind of model; the output mode `Default` becomes the real one."""
    mode: OutputMode = options.output_mode
    if mode is OutputMode.Default:
        mode = OutputMode.Final if training else OutputMode.All
    train, popart = options.Training, options._Popart.options  # pyright: ignore[reportPrivateUsage]
    precision, processes = options.Precision, options.Distributed
    buffers: list[str] | None = popart.get("updatableNamedBuffers")
    return Settings(
        is_training=training,
        batching=BatchPlan(
            device_iterations=options.device_iterations,
            gradient_accumulation=train.gradient_accumulation if training else 1,
            replicas=options.replication_factor,
            output_mode=mode,
            output_period=options.output_return_period,
            input_group_size=options.input_group_size,
            input_group_type=options.input_cgt,
        ),
        training=TrainingSettings(
            reduction=train.accumulation_and_replication_reduction_type,
            mean_reduction=train.meanAccumulationAndReplicationReductionStrategy,
            automatic_loss_scaling=bool(popart.get("automaticLossScalingSettings.enabled")),
            clip_norm=_if_set(train, "clip_grad_norm"),
            clip_value=_if_set(train, "clip_grad_value"),
            recomputation=popart.get("autoRecomputation"),
        ),
        precision=PrecisionSettings(
            half_float_casting=precision.half_float_casting,
            autocasting=precision.autocast_policy if precision.autocast_enabled else None,
            floating_point_checks=popart.get("enableFloatingPointChecks") is True,
            rounds_at_random=popart.get("enableStochasticRounding") is True,
            widens_statistics=precision.running_statistics_always_float,
        ),
        placement=PlacementSettings(
            strategy=StrategyPlan.of(options._execution_strategy),  # pyright: ignore[reportPrivateUsage]
            connection=options.connection_type,
            uses_ipu_model=_if_set(options, "use_model"),
            first_ipu=_if_set(options, "ipu_id"),
            rounds_up=options.auto_round_num_ipus,
            broadcasts_buffers=options.broadcast_buffers,
            runs_stages=options.run_stages or processes.processes_per_replica > 1,
            io_tiles=_if_set(options.TensorLocations, "numIOTiles") or 0,
        ),
        processes=_processes(processes, options.TensorLocations),
        files=FileSettings(
            caches=bool(popart.get("enableEngineCaching", True)) and environment.CACHE.flag(),
            cache=popart.get("cachePath"),
        ),
        report=ReportSettings(
            anchored=tuple(options.anchored_tensors.items()),
            module_namescope=options.module_namescope,
            show_progress=options.show_compilation_progress_bar,
            counts_cycles=bool(popart["instrumentWithHardwareCycleCounter"]),
            repeats=options.max_repeat_logs,
        ),
        engine=EngineSettings(
            name=_if_set(options, "engine"),
            random_seed=_if_set(options, "random_seed"),
            synthetic_data=popart.get("syntheticDataMode", 0),
            allows_shape_changes=options.allow_shape_changes,
            side_by_side=_if_set(options, "side_by_side"),
            updatable_buffers=None if buffers is None else tuple(buffers),
        ),
    )


def _processes(options: DistributedOptions, locations: TensorLocationOptions) -> ProcessSettings:
    index, count = place_of_data(options)
    parts = options.processes_per_replica
    weights = _sharded_from(locations, "location_weight")
    sharding = ShardingSettings(_sharded_from(locations, "location_optimizer"), weights)
    in_order = options.ordered_reduction and count > 1
    return ProcessSettings(index, count, in_order, options.processId % parts, parts, sharding)


_FEWEST_TO_SHARD = 8192  # elements, unless the user has another number


def _sharded_from(locations: TensorLocationOptions, kind: str) -> int | None:
    """From how many elements on tensors of a kind are to be shared out over replicas; None: never."""
    location: dict[str, int] = _if_set(locations, kind) or {}
    if not location.get("useReplicatedTensorSharding"):
        return None
    return location.get("minElementsForReplicatedTensorSharding", _FEWEST_TO_SHARD)


def _if_set(group: Any, name: str) -> Any:
    """The value of an option that has no default, or None."""
    return group(name) if group.exists(name) else None
