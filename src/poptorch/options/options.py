"""The fluent `Options`, and the frozen `Settings` that the compiler reads instead.

Every setter checks its argument at once, stores it under a snake_case name that can be read back as an attribute, and
returns the object it was called on. Wrapping a model freezes the object; `clone()` gives a copy that can be changed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from typing_extensions import Self

from poptorch.enums import OutputMode, ReductionType
from poptorch.options.batching import BatchPlan
from poptorch.options.checks import integer, member, one_of


class OptionGroup:
    """Named values with defaults, readable as attributes, changeable until frozen."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        object.__setattr__(self, "_values", dict(self.DEFAULTS))
        object.__setattr__(self, "_is_frozen", False)

    def _with(self, **values: Any) -> Self:
        self.checkIsFrozen()
        cast("dict[str, Any]", self._values).update(values)
        return self

    def set(self, **values: Any) -> Self:
        """Store values by their snake_case names; each must have the type of the value that is there now."""
        self.checkIsFrozen()
        for key, value in values.items():
            if key not in self._values:
                raise AssertionError(f"{key} is not an option of {type(self).__name__}; it has {sorted(self._values)}")
            current = self._values[key]
            if current is not None and not isinstance(value, type(current)):
                raise AssertionError(f"{key} takes {type(current).__name__}, not {value!r}")
        return self._with(**values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values and values[name] is not None:
            return values[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self.set(**{name: value})

    def checkIsFrozen(self) -> None:
        """Raise `AttributeError` if these options can no longer be changed."""
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: they are in use by a model or a loader. Change a copy made with clone()."
            )

    def _freeze(self) -> None:
        object.__setattr__(self, "_is_frozen", True)

    def _unfreeze(self) -> None:
        object.__setattr__(self, "_is_frozen", False)

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self._values.items() if value is not None)
        return f"{type(self).__name__}({values})"


class _TrainingOptions(OptionGroup):
    """Options that only matter for training."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
    }

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Add up the gradients of this many micro-batches before each weight update (default: 1)."""
        return self._with(gradient_accumulation=integer("gradientAccumulation", gradient_accumulation))

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Give the optimiser the mean (default) or the sum of the micro-batch gradients of one update."""
        allowed = (ReductionType.Mean, ReductionType.Sum)
        if not any(reduction_type is choice for choice in allowed):
            raise ValueError(f"the reduction type is ReductionType.Mean or ReductionType.Sum, not {reduction_type!r}")
        return self._with(accumulation_and_replication_reduction_type=reduction_type)


class Options(OptionGroup):
    """How a model is compiled and run.

    >>> import poptorch
    >>> options = poptorch.Options().deviceIterations(4).replicationFactor(2)
    >>> options.device_iterations
    4
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "device_iterations": 1,
        "replication_factor": 1,
        "output_mode": OutputMode.Default,
        "output_return_period": 1,
        "random_seed": None,
        "engine": None,
        "show_compilation_progress_bar": True,
    }

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_training", _TrainingOptions())

    @property
    def Training(self) -> _TrainingOptions:
        """The options that only matter for training."""
        return cast("_TrainingOptions", self._training)

    def deviceIterations(self, device_iterations: int) -> Self:
        """Run the compiled step this many times for each call from Python (default: 1)."""
        return self._with(device_iterations=integer("deviceIterations", device_iterations))

    def replicationFactor(self, replication_factor: int) -> Self:
        """Train this many copies of the model on different micro-batches of each update (default: 1)."""
        return self._with(replication_factor=integer("replicationFactor", replication_factor))

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Choose which micro-batches return their outputs (default: `All` for inference, `Final` for training)."""
        mode = member("outputMode", output_mode, OutputMode)
        if mode is OutputMode.EveryN and (output_return_period is None or output_return_period < 1):
            raise AssertionError(
                f"OutputMode.EveryN needs a positive output_return_period, not {output_return_period!r}: "
                "outputMode(poptorch.OutputMode.EveryN, 5) returns every fifth device iteration"
            )
        period = 1 if output_return_period is None else integer("output_return_period", output_return_period)
        return self._with(output_mode=mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen."""
        return self._values["output_mode"] is OutputMode.Default

    def randomSeed(self, random_seed: int) -> Self:
        """Make random numbers reproducible: seeds torch on the host now, and the device when it is attached."""
        seed = integer("randomSeed", random_seed)
        self._with(random_seed=seed)
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        return self

    def engine(self, engine: str) -> Self:
        """Run on `"inductor"` (native code) or on `"eager"` (starts at once, needs no C++ compiler)."""
        return self._with(engine=one_of("engine", engine, ("inductor", "eager")))

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar while compiling, if standard error is a terminal (default: on)."""
        return self._with(show_compilation_progress_bar=bool(show))

    def clone(self) -> Self:
        """An independent copy that can be changed even if this object is frozen."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            object.__setattr__(twin, name, copy.deepcopy(value, memo))
        twin._unfreeze()
        return twin

    def _freeze(self) -> None:
        super()._freeze()
        self.Training._freeze()

    def _unfreeze(self) -> None:
        super()._unfreeze()
        self.Training._unfreeze()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, Training={self.Training!r})"


@dataclass(frozen=True)
class Settings:
    """What the compiler needs to know, resolved and immutable."""

    training: bool
    batching: BatchPlan
    reduction: ReductionType
    random_seed: int | None
    show_progress: bool


def resolve(options: Options, *, training: bool) -> Settings:
    """Turn options into settings for one kind of model; the output mode `Default` becomes the real one."""
    mode: OutputMode = options.output_mode
    if mode is OutputMode.Default:
        mode = OutputMode.Final if training else OutputMode.All
    return Settings(
        training=training,
        batching=BatchPlan(
            device_iterations=options.device_iterations,
            gradient_accumulation=options.Training.gradient_accumulation if training else 1,
            replicas=options.replication_factor,
            output_mode=mode,
            output_period=options.output_return_period,
        ),
        reduction=options.Training.accumulation_and_replication_reduction_type,
        random_seed=options._values["random_seed"],
        show_progress=options.show_compilation_progress_bar,
    )
