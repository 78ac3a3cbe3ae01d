"""The CTC loss as two ops whose results have a size that is known before the lengths of a batch are.

PyTorch's kernel makes one of its results as long as the longest label of the batch. Ours have room for any label, so
that native code can be generated around them, and one program runs batches of all lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from poptorch.ir.ranges import adding_up_to, within

aten = torch.ops.aten
Two = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("poptorch::ctc_loss", mutates_args=())
def _forward(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> Two:
    """The loss of each sequence, and the logarithms of partial sums that the backward pass starts from."""
    losses, sums = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return losses, F.pad(sums, (0, _width(targets) - sums.shape[2]))


@_forward.register_fake
def _(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any) -> Two:
    steps, sequences, _ = log_probs.shape
    return log_probs.new_empty(sequences), log_probs.new_empty(sequences, steps, _width(targets))


@torch.library.custom_op("poptorch::ctc_loss_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    sums: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    sums = sums[:, :, : 2 * int(target_lengths.max()) + 1].contiguous()
    lengths = (input_lengths, target_lengths)
    return aten._ctc_loss_backward.Tensor(gradient, log_probs, targets, *lengths, losses, sums, blank, zero_infinity)


@_backward.register_fake
def _(gradient: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _width(targets: torch.Tensor) -> int:
    """A state for each label that a target may have, and for the blanks around them."""
    return 2 * targets.shape[-1] + 1


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Two) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_log_probs = _backward(gradient.contiguous(), *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return of_log_probs, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _checked_targets(targets: torch.Tensor, lengths: torch.Tensor, classes: int) -> Two:
    """Lengths and labels that PyTorch's kernel, which does not look at what it reads, can safely be given."""
    size = targets.shape[-1]
    lengths = within(lengths, 0, size, "ctc_loss", "target length")
    if targets.dim() == 1:  # labels of all sequences, one after the other
        lengths = adding_up_to(size, lengths, "ctc_loss", "sum of target lengths")
    elif size:
        is_padding = torch.arange(size) >= lengths.unsqueeze(1)
        targets = targets.masked_fill(is_padding, 0)  # which may be anything
    return lengths, within(targets, 0, classes - 1, "ctc_loss", "label") if targets.numel() else targets


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`F.ctc_loss` with the lengths as values of the batch instead of constants of the program; also in float16."""
    if log_probs.dim() == 2:  # one sequence without a dimension for the batch
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    input_lengths = torch.as_tensor(input_lengths, dtype=torch.int64).reshape(-1)
    target_lengths = torch.as_tensor(target_lengths, dtype=torch.int64).reshape(-1)
    input_lengths = within(input_lengths, 0, log_probs.shape[0], "ctc_loss", "input length")
    target_lengths, targets = _checked_targets(targets, target_lengths, log_probs.shape[-1])
    losses, _ = _forward(log_probs.float(), targets, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction == "mean":
        losses = (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(log_probs.dtype)
