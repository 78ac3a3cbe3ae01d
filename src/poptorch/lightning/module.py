"""`LightningIPUModule`: a LightningModule as a plain module, whose forward is the step that the Trainer wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import poptorch
from poptorch.lightning.recording import step_name


class CaptureSlot:
    """Who runs the step when a program is captured; copies of a wrapper share it."""

    def __init__(self) -> None:
        self.run: Callable[[Callable[..., Any], dict[str, Any]], Any] | None = None


class LightningIPUModule(nn.Module):
    """What executors wrap: its forward is `training_step`, `validation_step`, … by the state of the Trainer."""

    def __init__(self, forward_module: nn.Module) -> None:
        super().__init__()
        if not hasattr(forward_module, "training_step") or not hasattr(forward_module, "automatic_optimization"):
            raise ValueError(f"LightningIPUModule wraps a LightningModule, not a {type(forward_module).__name__}.")
        self._forward_module = forward_module
        self._capture = CaptureSlot()

    @property
    def module(self) -> Any:
        """The LightningModule."""
        return self._forward_module

    @property
    def lightning_module(self) -> Any:
        """The LightningModule."""
        return self._forward_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the current stage, or the module itself if no Trainer is running."""
        name = step_name(getattr(self._forward_module, "_trainer", None))
        step = self._forward_module if name is None else getattr(self._forward_module, name)
        if self._capture.run is not None and poptorch.isRunningOnIpu():
            return self._capture.run(step, kwargs)
        return step(*args, **kwargs)
