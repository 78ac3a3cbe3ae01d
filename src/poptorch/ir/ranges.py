"""Which integers an op takes, and a marker for integers that must be of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """The integers that an op takes: from `low` to `high`, both included, and one more that it ignores."""

    low: int
    high: int
    op: str
    what: str = "index"  # that the integers are
    ignored: int | None = None

    def __str__(self) -> str:
        if self.high < self.low:
            return "none, because there is nothing to choose from"
        return f"{self.low} or more" if self.high == NO_LIMIT else f"{self.low} to {self.high}"


@torch.library.custom_op("poptorch::within", mutates_args=())
def within(values: torch.Tensor, low: int, high: int, op: str, what: str) -> torch.Tensor:
    """The same integers, marked: the compiler sees to it that an error tells of any that `op` does not take.

    The marker is gone when a program runs. Where the check is made by the program itself, the integers that go on
    from here are brought into the range first, so that what follows is safe.
    """
    return values.clone()


@within.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(values: torch.Tensor, low: int, high: int, op: str, what: str) -> torch.Tensor:
    return torch.empty_like(values)


@within.register_vmap  # pyright: ignore[reportUnknownMemberType]
def _(
    info: object, dims: tuple[int | None, ...], values: torch.Tensor, low: int, high: int, op: str, what: str
) -> tuple[torch.Tensor, int | None]:
    return within(values, low, high, op, what), dims[0]


def adding_up_to(size: int, lengths: torch.Tensor, op: str, what: str) -> torch.Tensor:
    """The same lengths, marked: along their last dimension they must add up to `size`."""
    total = lengths.sum(-1, keepdim=True)
    one_for_all = torch.where(torch.arange(lengths.shape[-1]) == 0, size, 0).to(lengths.dtype)
    return torch.where(within(total, size, size, op, what) == total, lengths, one_for_all)


WITHIN = torch.ops.poptorch.within.default
