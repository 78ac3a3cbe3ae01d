"""Options about how a model is captured."""

from __future__ import annotations

from typing_extensions import Self

from poptorch._logging import logger
from poptorch.errors import OptionValueError
from poptorch.options.checks import truth
from poptorch.options.group import OptionGroup, option


class JitOptions(OptionGroup):
    """Options about how a model is captured; there is one way, so there is nothing left to choose."""

    @option()
    def traceModel(self, trace_model: bool) -> Self:
        """Deprecated: `False` is accepted and does nothing, `True` (torch.jit.trace) is refused."""
        logger.warning("Jit.traceModel is deprecated: models are captured by dispatch, never by torch.jit.")
        if truth("traceModel", trace_model):
            raise OptionValueError("traceModel(True) is not supported: torch.jit.trace is not used. Leave it out.")
        return self
