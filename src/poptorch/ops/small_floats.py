"""Round numbers to a small float format, as if a device computed in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BIAS, _MANTISSA = 1023, 52  # of float64, in which the rounding is exact


@dataclass(frozen=True)
class SmallFloat:
    """A float of one sign bit, some bits of exponent and some of mantissa, as IEEE 754 has them, without infinities.

    `SmallFloat(5, 10)` holds the numbers of float16, `SmallFloat(8, 7)` those of bfloat16.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def least_exponent(self) -> int:
        """Of numbers that use the whole mantissa."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def largest(self) -> float:
        """The largest number: what is larger becomes this."""
        return (2 - 2.0**-self.mantissa_bits) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1)

    def round(self, tensor: torch.Tensor, *, stochastic: bool = False) -> torch.Tensor:
        """The numbers of this format that are nearest, the even one of two; or a neighbour, more often the nearer."""
        exact = tensor.detach().double()
        exponent = ((exact.view(torch.int64) >> _MANTISSA) & (2 * _BIAS + 1)) - _BIAS
        place = exponent.clamp(min=self.least_exponent) - self.mantissa_bits  # of the last bit that is kept
        step = ((place + _BIAS) << _MANTISSA).view(torch.float64)
        scaled = exact / step
        whole = torch.floor(scaled + torch.rand_like(scaled)) if stochastic else torch.round(scaled)
        rounded = (whole * step).clamp(-self.largest, self.largest)
        return torch.where(exact.isnan(), exact, rounded).to(tensor.dtype)
