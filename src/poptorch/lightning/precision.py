"""`IPUPrecision`: which types the numbers of a model have, and an optimiser step that the program has already done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poptorch.lightning import nested
from poptorch.lightning.packages import Lightning

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object

SUPPORTED = ("32-true", "16-mixed", "16-true")


class PrecisionBehaviour(_Base):
    """What `IPUPrecision` adds to the precision plugin of either package."""

    package: Lightning

    def __init__(self, precision: Any = "32-true") -> None:
        unified = "32-true" if precision is None else self.package.unify_precision(precision)
        if unified not in SUPPORTED:
            choices = ", ".join(repr(choice) for choice in SUPPORTED)
            raise ValueError(
                f"`Trainer(accelerator='ipu', precision={unified!r})` is not supported: choose one of {choices}."
            )
        super().__init__()
        self.precision = unified

    @property
    def default_dtype(self) -> torch.dtype | None:
        """The type of tensors that a step makes, if it is not torch's default."""
        return torch.float16 if self.precision == "16-true" else None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the weights the type that they train in."""
        return module.half() if self.precision == "16-true" else module

    def convert_input(self, data: Any) -> Any:
        """The batch with its floating-point tensors in half precision, if the model computes in it."""
        if self.precision == "32-true":
            return data
        return nested.mapped(data, lambda _, leaf: _half(leaf))

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the program has computed the gradients."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the training step, which updates the weights, and the hook that comes before an update."""
        result = closure()
        self.package.call_callbacks(model.trainer, "on_before_optimizer_step", optimizer)
        self.package.call_module(model.trainer, "on_before_optimizer_step", optimizer)
        return result

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the program has clipped them."""


def _half(leaf: Any) -> Any:
    is_wide = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float32, torch.float64)
    return leaf.half() if is_wide else leaf
