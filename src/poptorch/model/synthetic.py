"""Inputs that are made up instead of taken from the caller, for `Options.enableSyntheticData`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# By the value of `syntheticDataMode`; 0 is off.
_GENERATORS: dict[int, Callable[..., torch.Tensor]] = {1: torch.zeros, 2: torch.randn, 3: torch.rand}


class SyntheticInputs:
    """Tensors like those of a call, of which only shapes and types are looked at; made once for each kind of call.

    Floating-point numbers are zeros, normal or uniform; integers and booleans are zero, which any index may be.
    """

    def __init__(self, mode: int, seed: int | None) -> None:
        self._mode = mode
        self._random = torch.Generator().manual_seed(seed or 0)  # the host's own random numbers are left alone
        self._made: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._one(index, tensor) for index, tensor in enumerate(tensors)]

    def _one(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        key = (index, tensor.shape, tensor.dtype)
        if key not in self._made:
            self._made[key] = self._make(tensor)
        return self._made[key]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        generate = _GENERATORS[self._mode]
        if generate is torch.zeros or not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return generate(tensor.shape, dtype=tensor.dtype, generator=self._random)
