"""Options about number formats and rounding."""

from __future__ import annotations

import torch
from typing_extensions import Self

from poptorch._logging import logger
from poptorch.autocasting import Policy
from poptorch.enums import HalfFloatCastingBehavior
from poptorch.errors import OptionError, OptionValueError
from poptorch.options.checks import boolean, member
from poptorch.options.group import OptionGroup, option
from poptorch.options.popart import PopartOptions

_PARTIALS = {torch.float32: "float", torch.float16: "half"}


class PrecisionOptions(OptionGroup):
    """Options about number formats and rounding."""

    def __init__(self, popart: PopartOptions) -> None:
        super().__init__()
        vars(self)["_popart"] = popart

    @option(popart=("enableFloatingPointChecks",))
    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Raise `poptorch.Error` when a model divides by zero, overflows or computes with NaN (default: off)."""
        self._popart.set("enableFloatingPointChecks", boolean("enableFloatingPointExceptions", enabled))
        return self

    @option(popart=("enableStochasticRounding",))
    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Round to float16 up or down at random, without bias (default: off)."""
        self._popart.set("enableStochasticRounding", enabled)
        return self

    @option(popart=("partialsTypeMatMuls", "convolutionOptions"))
    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Keep intermediate sums of products as `torch.float` or `torch.half`; replaces `convolutionOptions`.

        Recorded only: here they are always `torch.float`.
        """
        if not isinstance(dtype, torch.dtype) or dtype not in _PARTIALS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionValueError(f"setPartialsType takes torch.float or torch.half, not {dtype!r}")
        self._popart.set("partialsTypeMatMuls", _PARTIALS[dtype])
        self._popart.set("convolutionOptions", {"partialsType": _PARTIALS[dtype]})
        return self

    @option(half_float_casting=HalfFloatCastingBehavior.Default)
    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Choose the type of an operation that mixes float16 and float32."""
        behaviour = member("halfFloatCasting", half_float_casting, HalfFloatCastingBehavior)
        return self._store(half_float_casting=behaviour)

    @option(autocast_enabled=True)
    def autocastEnabled(self, autocast_enabled: bool) -> Self:
        """Let regions of `poptorch.autocast()` have their effect."""
        return self._store(autocast_enabled=boolean("autocastEnabled", autocast_enabled))

    @option(autocast_policy=Policy())
    def autocastPolicy(self, autocast_policy: Policy) -> Self:
        """Choose which operations inside `poptorch.autocast()` are float16 and which float32."""
        if not isinstance(autocast_policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"autocastPolicy takes a poptorch.autocasting.Policy, not {autocast_policy!r}")
        return self._store(autocast_policy=autocast_policy)

    @option(running_statistics_always_float=True)
    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Keep the running mean and variance of float16 normalisation layers in float32 (default: on)."""
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionValueError(f"runningStatisticsAlwaysFloat takes True or False, not {value!r}")
        logger.warning("runningStatisticsAlwaysFloat is deprecated: leave it out, which keeps statistics in float32.")
        return self._store(running_statistics_always_float=value)

    runningVarianceAlwaysFloat = runningStatisticsAlwaysFloat  # its name before PopTorch 2.2
