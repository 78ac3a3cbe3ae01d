"""`identity_loss`: mark a value of your own as the loss."""

from __future__ import annotations

import torch

from poptorch.capture import current_marks


def identity_loss(x: torch.Tensor, reduction: str, *, final: bool = False) -> torch.Tensor:
    """Mark `x` as the loss that training minimises, reduced by `"mean"`, `"sum"` or not at all (`"none"`).

    Needed for a loss of your own and for a sum of several losses. Outside a compiled model it only reduces. With
    `final=True` no other loss of the model counts: they may be returned beside this one.

    >>> import poptorch, torch
    >>> poptorch.identity_loss(torch.tensor([1.0, 3.0]), reduction="mean")
    tensor(2.)
    """
    if reduction == "mean":
        loss = torch.mean(x)
    elif reduction == "sum":
        loss = torch.sum(x)
    elif reduction == "none":
        loss = x.clone()
    else:
        raise AssertionError(f"Unsupported reduction type! It is {reduction!r}; use 'mean', 'sum' or 'none'.")
    marks = current_marks()
    return loss if marks is None else marks.mark(loss, "identity_loss", source=x, final=final)
