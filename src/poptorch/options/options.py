"""The fluent `Options`.

Every setter checks its argument at once, stores it under a snake_case name that can be read back as an attribute, and
returns the object it was called on. Wrapping a model freezes the object; `clone()` gives a copy that can be changed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple, cast

import torch
from typing_extensions import Self

from poptorch import environment
from poptorch._logging import logger
from poptorch.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.errors import OptionError, OptionValueError
from poptorch.options import textual
from poptorch.options.checks import (
    at_least_one,
    boolean,
    integer,
    member,
    not_negative,
    one_of,
    text,
    texts,
    truth,
)
from poptorch.options.distributed import DistributedOptions
from poptorch.options.group import OptionGroup, Stored, option, show
from poptorch.options.jit import JitOptions
from poptorch.options.locations import TensorLocationOptions
from poptorch.options.popart import PopartOptions
from poptorch.options.precision import PrecisionOptions
from poptorch.options.strategies import ExecutionStrategy, PipelinedExecution, ShardedExecution
from poptorch.options.training import TrainingOptions

_UNLIMITED = 2**64 - 1
_IPU_VERSIONS = (1, 2, 21)


class Anchor(NamedTuple):
    """A tensor of the graph that every call collects beside the outputs; without a mode it follows the model's."""

    long_name: str
    output_mode: OutputMode | None
    output_return_period: int


class Options(OptionGroup):
    """How a model is compiled and run.

    >>> import poptorch
    >>> options = poptorch.Options().deviceIterations(4).replicationFactor(2)
    >>> options.device_iterations
    4
    """

    def __init__(self) -> None:
        super().__init__()
        popart = PopartOptions()
        vars(self).update(
            _popart=popart,
            _training=TrainingOptions(popart),
            _precision=PrecisionOptions(popart),
            _jit=JitOptions(),
            _distributed=DistributedOptions(),
            _tensor_locations=TensorLocationOptions(),
            _execution_strategy=PipelinedExecution(),
        )
        cache = environment.CACHE_DIR.read()
        if cache:
            self.enableExecutableCaching(cache)
        textual.apply_json(self, environment.DEFAULT_OPTIONS.read() or "{}", environment.DEFAULT_OPTIONS.name)

    # ---- groups of options

    @property
    def Training(self) -> TrainingOptions:
        """Options that only matter for training."""
        return cast("TrainingOptions", self._training)

    @property
    def Precision(self) -> PrecisionOptions:
        """Options about number formats and rounding."""
        return cast("PrecisionOptions", self._precision)

    @property
    def GraphProcessing(self) -> PrecisionOptions:
        """The name of `Precision` before PopTorch 2.0."""
        return self.Precision

    @property
    def Jit(self) -> JitOptions:
        """Options about how a model is captured."""
        return cast("JitOptions", self._jit)

    @property
    def Distributed(self) -> DistributedOptions:
        """Options about the processes of a program that runs in several of them."""
        return cast("DistributedOptions", self._distributed)

    @property
    def TensorLocations(self) -> TensorLocationOptions:
        """Options about where tensors are stored."""
        return cast("TensorLocationOptions", self._tensor_locations)

    @property
    def _Popart(self) -> PopartOptions:
        return cast("PopartOptions", self._popart)

    @property
    def Popart(self) -> PopartOptions:
        """The name of `_Popart` before PopTorch 2.1."""
        return self._Popart

    def _groups(self) -> dict[str, OptionGroup | PopartOptions]:
        """The groups by the name of their property."""
        names = ("Training", "Precision", "Jit", "Distributed", "TensorLocations", "_Popart")
        return {name: getattr(self, name) for name in names}

    # ---- batches

    @option(device_iterations=Stored(int, 1, least=1))
    def deviceIterations(self, device_iterations: int) -> Self:
        """Run the compiled step this many times for each call from Python."""
        return self._store(device_iterations=at_least_one("deviceIterations", device_iterations))

    @option(replication_factor=Stored(int, 1, least=1))
    def replicationFactor(self, replication_factor: int) -> Self:
        """Train this many copies of the model on different micro-batches of each update."""
        return self._store(replication_factor=at_least_one("replicationFactor", replication_factor))

    @option(input_group_size=Stored(int, 1, least=1), input_cgt=CommGroupType.Consecutive)
    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Feed the same data to this many replicas; set `replicationFactor` first."""
        kind = member("inputReplicaGrouping input_group_type", input_group_type, CommGroupType)
        size, replicas = integer("inputReplicaGrouping", input_group_size), self.replication_factor
        if kind is CommGroupType.All:
            raise OptionValueError(
                "inputReplicaGrouping does not take CommGroupType.All: use Consecutive with all replicas in one group"
            )
        if kind is CommGroupType.NoGrouping:
            size, kind = 1, CommGroupType.Consecutive
        if size < 1 or size > replicas or replicas % size:
            raise OptionValueError(
                f"groups of {size} replicas do not divide the {replicas} that replicationFactor asks for now"
            )
        return self._store(input_group_size=size, input_cgt=kind)

    @option(output_mode=OutputMode.Default, output_return_period=1)
    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Choose which micro-batches return their outputs (default: `All` for inference, `Final` for training)."""
        mode = member("outputMode", output_mode, OutputMode)
        period = 1 if output_return_period is None else integer("output_return_period", output_return_period)
        if mode is OutputMode.EveryN and (output_return_period is None or period < 1):
            raise OptionError(
                f"OutputMode.EveryN needs a positive output_return_period, not {output_return_period!r}: "
                "outputMode(poptorch.OutputMode.EveryN, 5) returns every fifth device iteration"
            )
        if mode is not OutputMode.EveryN and output_return_period is not None:
            logger.info("output_return_period %s is ignored: it belongs to OutputMode.EveryN", period)
        return self._store(output_mode=mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen."""
        return self._values["output_mode"] is OutputMode.Default

    @option(even_if_frozen=True, anchored_tensors={})
    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
        *,
        anchor_mode: OutputMode | None = None,
        anchor_return_period: int | None = None,
    ) -> None:
        """Collect a tensor of the graph in every call; `getAnchoredTensor(short_name)` of the executor gives it.

        Returns nothing, and works on frozen options. `anchor_mode` and `anchor_return_period` are older names.
        """
        mode = output_mode if anchor_mode is None else anchor_mode
        period = output_return_period if anchor_return_period is None else anchor_return_period
        if mode is not None:
            mode = member("anchorTensor output_mode", mode, OutputMode)
        period = at_least_one("anchorTensor output_return_period", period) if mode is OutputMode.EveryN else 1
        name = text("anchorTensor short_name", short_name)
        self.anchored_tensors[name] = Anchor(text("anchorTensor long_name", long_name), mode, period)

    # ---- devices

    @option(use_model=Stored(bool))
    def useIpuModel(self, use_model: bool) -> Self:
        """Run on the emulated IPU (True) or insist on hardware (False); wins over `POPTORCH_IPU_MODEL`."""
        return self._store(use_model=truth("useIpuModel", use_model))

    @option(connection_type=Stored(int, ConnectionType.Always))
    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Take the device when compiling, when running, or never (compile only)."""
        return self._store(connection_type=member("connectionType", connection_type, ConnectionType))

    @option(ipu_version=Stored(int))
    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile for an IPU of this version (1, 2 or 21) without one; sets `connectionType` to `Never`."""
        if integer("useOfflineIpuTarget", ipu_version) not in _IPU_VERSIONS:
            raise OptionError(f"useOfflineIpuTarget takes an IPU version, 1, 2 or 21, not {ipu_version}")
        return self._store(ipu_version=ipu_version, connection_type=ConnectionType.Never)

    @option(ipu_id=Stored(int, least=0))
    def useIpuId(self, ipu_id: int) -> Self:
        """Use the device with this id instead of any that is free."""
        return self._store(ipu_id=not_negative("useIpuId", ipu_id))

    @option(auto_round_num_ipus=False)
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Reserve the next power of two of IPUs if the model needs another number."""
        return self._store(auto_round_num_ipus=boolean("autoRoundNumIPUs", auto_round_num_ipus))

    @option(sync_pattern=Stored(int, SyncPattern.Full))
    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Which IPUs wait for each other."""
        return self._store(sync_pattern=member("syncPattern", sync_pattern, SyncPattern))

    @option(available_memory_proportion={})
    def setAvailableMemoryProportion(self, available_memory_proportion: Mapping[str, float]) -> Self:
        """How much of each IPU's memory one operation may use: `{"IPU0": 0.3, "IPU1": 0.6}`."""
        if not isinstance(available_memory_proportion, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                f'setAvailableMemoryProportion takes a dictionary such as {{"IPU0": 0.3}}, '
                f"not {available_memory_proportion!r}"
            )
        by_ipu = {_ipu_number(key): value for key, value in available_memory_proportion.items()}
        return self._store(available_memory_proportion=by_ipu)

    # ---- how the model runs

    @option()
    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Self:
        """How blocks of the model share the IPUs (default: `PipelinedExecution()`)."""
        if not isinstance(strategy, ExecutionStrategy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                f"setExecutionStrategy takes a strategy object such as poptorch.ShardedExecution(), not {strategy!r}"
            )
        self._execution_strategy = strategy
        return self

    @option(random_seed=Stored(int))
    def randomSeed(self, random_seed: int) -> Self:
        """Make random numbers reproducible: seeds torch on the host now, and the device when it is attached."""
        seed = integer("randomSeed", random_seed)
        try:
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        except (RuntimeError, OverflowError, ValueError) as error:
            raise OptionError(f"randomSeed takes a 64-bit integer, not {seed}: {error}") from error
        return self._store(random_seed=seed)

    @option(broadcast_buffers=True)
    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Whether all replicas share their buffers; `False` gives each replica its own."""
        return self._store(broadcast_buffers=boolean("broadcastBuffers", broadcast_buffers))

    @option(popart=("updatableNamedBuffers",))
    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """The buffers that `copyNamedBuffersToDevice()` of the executor copies."""
        self._Popart.set("updatableNamedBuffers", texts("updatableNamedBuffers", buffers))
        return self

    @option(popart=("syntheticDataMode",))
    def enableSyntheticData(self, enabled: bool) -> Self:
        """Run on random numbers instead of the caller's data, to measure speed (default: off).

        The caller's tensors are only asked for their shapes and types, and what a model returns means nothing. Other
        data by `_Popart.set("syntheticDataMode", mode)`: 1 for zeros, 2 for normal numbers, 3 for uniform ones.
        """
        self._Popart.set("syntheticDataMode", 2 if truth("enableSyntheticData", enabled) else 0)
        return self

    @option(popart=("enableStableNorm",))
    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute normalisation layers in the slower, more stable way."""
        self._Popart.set("enableStableNorm", enabled)
        return self

    @option(relax_optimizer_attributes_checks=False)
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Do not warn about attributes that an optimiser should not have."""
        return self._store(relax_optimizer_attributes_checks=truth("relaxOptimizerAttributesChecks", relax))

    @option(engine=Stored(str))
    def engine(self, engine: str) -> Self:
        """Run on `"inductor"` (native code), on `"eager"` (starts at once, needs no C++ compiler), or on `"tiered"`.

        The last one starts on eager and goes on with native code as soon as a process in the background has made it.
        """
        return self._store(engine=one_of("engine", engine, ("inductor", "eager", "tiered")))

    @option(side_by_side=Stored(bool))
    def runSideBySide(self, side_by_side: bool) -> Self:
        """Compute the micro-batches of an update side by side (True) or one after the other (False).

        Without this option the compiler decides: side by side where that means the same, and is faster. `True` asks for
        it wherever it means the same; where it does not, a warning says why.
        """
        return self._store(side_by_side=truth("runSideBySide", side_by_side))

    @option(allow_shape_changes=False)
    def allowShapeChanges(self, allow: bool = True) -> Self:
        """Compile again for each new set of argument shapes, instead of raising an error."""
        return self._store(allow_shape_changes=boolean("allowShapeChanges", allow))

    @option(run_stages=False)
    def runStages(self, run: bool = True) -> Self:
        """Run the stages of a model one by one as the schedule says, on a thread per IPU, instead of as one program."""
        return self._store(run_stages=boolean("runStages", run))

    # ---- compilation and reports

    @option(popart=("cachePath", "enableEngineCaching"))
    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Keep compiled programs in this folder and use them again; `None` switches it off."""
        if path is not None:
            plain = os.fspath(path) if isinstance(path, os.PathLike) else text("enableExecutableCaching", path)
            self._Popart.set("cachePath", plain)
        self._Popart.set("enableEngineCaching", path is not None)
        return self

    @option(popart=("engineOptions",))
    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write a report of each model below this folder (default: the working folder)."""
        wanted = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": "." if profile_dir is None else text("enableProfiling", profile_dir),
            "autoReport.all": "true",
        }
        for key in wanted:
            if key in environment.POPLAR_ENGINE_OPTIONS.read():
                logger.warning(
                    "enableProfiling sets %s, but %s mentions it too and wins.",
                    key,
                    environment.POPLAR_ENGINE_OPTIONS.name,
                )
        before = self._Popart.options.get("engineOptions", {})
        if not isinstance(before, dict):
            raise OptionError(f"enableProfiling adds to the engine options, but they are {before!r}, not a dictionary")
        self._Popart.set("engineOptions", {**cast("dict[str, str]", before), **wanted})
        return self

    @option(model_name=Stored(str))
    def modelName(self, name: str) -> Self:
        """The name of the model in reports (default: `inference` or `training`)."""
        return self._store(model_name=text("modelName", name))

    @option(log_dir=".")
    def logDir(self, log_dir: str) -> Self:
        """The folder for log files."""
        return self._store(log_dir=text("logDir", log_dir))

    @option(max_repeat_logs=Stored(int, 4, least=0))
    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """How often the same warning is shown before it is suppressed; `None` for always."""
        return self._store(
            max_repeat_logs=_UNLIMITED if max_lines is None else not_negative("maxRepeatLogs", max_lines)
        )

    @option(popart=("instrumentWithHardwareCycleCounter",))
    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Log how many IPU cycles each call takes (default: off)."""
        self._Popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    @option(show_compilation_progress_bar=True)
    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar while compiling, if standard error is a terminal."""
        return self._store(show_compilation_progress_bar=truth("showCompilationProgressBar", show))

    @option(module_namescope=True)
    def disableModuleNamescope(self) -> Self:
        """Leave the module path out of the names of tensors and operations."""
        return self._store(module_namescope=False)

    @option(source_location_excludes=["/poptorch/", "/torch/"])
    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Parts of file names that do not belong to the user's own code."""
        return self._store(source_location_excludes=texts("sourceLocationExcludes", excludes))

    @option()
    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Add to the parts of file names that do not belong to the user's own code."""
        more = texts("appendToLocationExcludes", excludes)
        return self._store(source_location_excludes=[*self.source_location_excludes, *more])

    # ---- from text

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply a file with one setting per line, written as in Python without the leading `options.`"""
        textual.apply_file(self, filepath)
        return self

    def from_json(self, string: str) -> Self:
        """Apply a JSON object of setters and arguments, such as `{"Training.gradientAccumulation": 4}`."""
        textual.apply_json(self, string)
        return self

    # ---- older names

    def anchorMode(self, anchor_mode: OutputMode, anchor_return_period: int | None = None) -> Self:
        """The name of `outputMode` before PopTorch 2.4."""
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultAnchorMode(self) -> bool:
        """The name of `defaultOutputMode` before PopTorch 2.4."""
        return self.defaultOutputMode()

    @property
    def anchor_mode(self) -> OutputMode:
        """The name of `output_mode` before PopTorch 2.4."""
        return self._values["output_mode"]

    @property
    def anchor_return_period(self) -> int:
        """The name of `output_return_period` before PopTorch 2.4."""
        return self._values["output_return_period"]

    def enablePipelining(self, enable_pipelining: bool) -> Self:
        """The choice between `PipelinedExecution` and `ShardedExecution` in early releases."""
        return self.setExecutionStrategy(
            PipelinedExecution() if truth("enablePipelining", enable_pipelining) else ShardedExecution()
        )

    def profile(self, profile: bool) -> Self:
        """The name of `enableProfiling` in early releases."""
        return self.enableProfiling() if truth("profile", profile) else self

    # ---- the object itself

    def clone(self) -> Self:
        """An independent copy that can be changed even if this object is frozen."""
        return copy.deepcopy(self)

    def _resolved(self, default_mode: OutputMode) -> Self:
        """A frozen copy in which the output mode, and that of every anchor, is a real one."""
        own = self.clone()
        if own.defaultOutputMode():
            own.outputMode(default_mode)
        mode = own.output_mode
        period = own.output_return_period if mode is OutputMode.EveryN else 1
        for name, anchor in own.anchored_tensors.items():
            if not isinstance(anchor, Anchor):
                raise OptionError(f"anchored_tensors holds {anchor!r} for {name!r}: use anchorTensor(...) to add one")
            if anchor.output_mode is None:
                own.anchored_tensors[name] = Anchor(anchor.long_name, mode, period)
        own._freeze()
        return own

    def toDict(self) -> dict[str, Any]:
        """Everything in one flat dictionary; the output mode must have been chosen, as it is for an executor."""
        if self.defaultOutputMode():
            raise OptionError("toDict needs an output mode: call outputMode(...) first, or ask executor.options")
        parts = [self._execution_strategy.backendOptions(), self._Popart.options, self._values]
        parts += [group.toDict() for group in self._groups().values() if isinstance(group, OptionGroup)]
        merged: dict[str, Any] = {}
        for part in parts:
            twice = merged.keys() & part.keys()
            if twice:
                raise OptionError(f"{', '.join(sorted(twice))} set twice: use the method of Options, not _Popart.set")
            merged.update(part)
        return merged

    def _freeze(self) -> None:
        super()._freeze()
        for group in self._groups().values():
            group._freeze()

    def _unfreeze(self) -> None:
        super()._unfreeze()
        for group in self._groups().values():
            group._unfreeze()

    def __repr__(self) -> str:
        strategy = f"execution_strategy={self._execution_strategy!r}"
        groups = [f"{name}={group!r}" for name, group in self._groups().items()]
        lines = [*self._shown(), strategy, *groups]
        return "\n".join([f"{type(self).__name__}(", *(f"    {line}," for line in lines), ")"])

    def _repr_html_(self) -> str:
        """A table for notebooks; what was changed is bold."""
        groups = {"": self, **{f"{name}.": g for name, g in self._groups().items() if isinstance(g, OptionGroup)}}
        rows: list[tuple[str, str, bool]] = []
        for prefix, group in groups.items():
            declared = group._declared()
            for key, value in group.toDict().items() if prefix else self._values.items():
                rows.append((prefix + key, show(value), declared[key].default != value))
        rows.append(("execution strategy", repr(self._execution_strategy), False))
        rows.append(("_Popart", repr(self._Popart), False))
        lines = (
            f"<tr><td>{escape(name)}</td><td>{f'<b>{escape(value)}</b>' if changed else escape(value)}</td></tr>"
            for name, value, changed in rows
        )
        return f"<table><tr><th>option</th><th>value</th></tr>{''.join(lines)}</table>"


def _ipu_number(key: object) -> int:
    if not isinstance(key, str) or not key.startswith("IPU"):
        raise OptionError(f'setAvailableMemoryProportion takes keys such as "IPU0", not {key!r}')
    try:
        return not_negative(f"the IPU of {key!r}", int(key[3:]))
    except ValueError:
        raise OptionValueError(f'setAvailableMemoryProportion takes keys such as "IPU0", not {key!r}') from None
