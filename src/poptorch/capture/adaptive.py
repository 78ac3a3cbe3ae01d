"""`nn.AdaptiveLogSoftmaxWithLoss` in a form that does not depend on how many labels of a batch are rare.

PyTorch computes the scores of each cluster of rare classes for those rows that need them. A compiled program has fixed
sizes, so it computes all of them, as `log_prob` does, and picks those of the labels.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from poptorch.capture.context import current_marks

_FORWARD = nn.AdaptiveLogSoftmaxWithLoss.forward


def has_adaptive_loss(module: nn.Module) -> TypeGuard[nn.AdaptiveLogSoftmaxWithLoss]:
    """Whether a module is PyTorch's own, and not one that computes otherwise."""
    return isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) and type(module).forward is _FORWARD


def adaptive_loss(module: nn.AdaptiveLogSoftmaxWithLoss, input_: torch.Tensor, target_: torch.Tensor) -> Any:
    """What the module's own `forward` gives; its loss is marked."""
    if target_.dim() > 1 or input_.dim() != target_.dim() + 1 or input_.shape[:-1] != target_.shape:
        return _FORWARD(module, input_, target_)  # which says what is wrong
    head = F.log_softmax(module.head(input_), -1)
    common, clusters = head.split([module.shortlist_size, module.n_clusters], -1)
    rare = [F.log_softmax(tail(input_), -1) for tail in module.tail]
    scores = [common, *(score + clusters[..., i : i + 1] for i, score in enumerate(rare))]
    output = torch.cat(scores, -1).gather(-1, target_.unsqueeze(-1)).squeeze(-1)
    loss, marks = (-output).mean(), current_marks()
    if marks is not None:
        loss = marks.mark(loss, "AdaptiveLogSoftmaxWithLoss")
    return nn.modules.adaptive._ASMoutput(output, loss)
