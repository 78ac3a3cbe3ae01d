"""The cross entropy over many classes and its gradient, in fewer walks over the scores.

In:    a training StepGraph.
Out:   the same graph in which the gradient of a cross entropy reuses what its forward pass computed.
Keeps: every value up to rounding, the signature.

PyTorch takes the log-softmax of every score and picks one per row. On the way back it spreads the gradient of that one
over a row of zeros and sums the row up again. The gradient is known to be `softmax - 1` at the label and `softmax`
elsewhere, and the exponentials that softmax needs are those that log-softmax has computed already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from poptorch.engines.host import Host
from poptorch.engines.private import inductor_prims
from poptorch.ir import StepGraph, insert, value_of
from poptorch.ir.inline import inline

aten = torch.ops.aten
_SOFTMAX, _SOFTMAX_BACKWARD = aten._log_softmax.default, aten._log_softmax_backward_data.default
_LOSS_BACKWARD = aten.nll_loss_backward.default
_MANY_SCORES = 2**15  # below that, fewer and simpler loops are faster than fewer walks
_MEAN = 1  # ATen's number for the reduction


@dataclass(frozen=True)
class _CrossEntropy:
    """A log-softmax, the gradient of the loss that follows it, and the gradient of the scores."""

    softmax: fx.Node
    loss_backward: fx.Node
    softmax_backward: fx.Node


def join_cross_entropies(graph: StepGraph, host: Host) -> StepGraph:
    """Let the gradients of cross entropies reuse what their forward passes computed."""
    if not any(node.target is _SOFTMAX_BACKWARD and _match(node) is not None for node in graph.ops.nodes):
        return graph
    ops = graph.copy_ops()
    for node in list(ops.nodes):
        if node.target is _SOFTMAX_BACKWARD and (found := _match(node)) is not None:
            _join(ops, found)
    return replace(graph, ops=ops)


def _match(softmax_backward: fx.Node) -> _CrossEntropy | None:
    loss_backward, softmax, dim, dtype = softmax_backward.args
    assert isinstance(loss_backward, fx.Node)
    assert isinstance(softmax, fx.Node)
    if loss_backward.target is not _LOSS_BACKWARD or softmax.target is not _SOFTMAX or len(loss_backward.users) > 1:
        return None
    scores: Tensor = value_of(softmax)
    weight = loss_backward.args[3]
    if (
        weight is not None
        or dim not in (1, -1)
        or dtype != torch.float32
        or scores.dim() != 2
        or scores.numel() < _MANY_SCORES
    ):
        return None
    return _CrossEntropy(softmax, loss_backward, softmax_backward)


def _join(graph: fx.Graph, found: _CrossEntropy) -> None:
    with graph.inserting_before(found.softmax):
        result, powers, sums = inline(graph, found.softmax, log_softmax_in_parts, found.softmax.args[0])
    found.softmax.replace_all_uses_with(result)
    gradient, _, labels, _, reduction, ignored, count = found.loss_backward.args
    with graph.inserting_before(found.softmax_backward):
        if reduction == _MEAN:
            gradient = insert(graph, found.softmax_backward, aten.div.Tensor, gradient, count)
        like, arguments = found.softmax_backward, (gradient, powers, sums, labels, ignored)
        joined = inline(graph, like, gradient_of_scores, *arguments)
    found.softmax_backward.replace_all_uses_with(joined)
    for node in (found.softmax_backward, found.loss_backward, found.softmax):
        graph.erase_node(node)


def log_softmax_in_parts(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-softmax of each row, the exponentials of the row (at most 1), and their sum."""
    shifted = scores - scores.amax(1, keepdim=True)
    powers = shifted.exp()
    powers = inductor_prims.force_stride_order(powers, powers.stride())  # kept, and not computed a second time
    sums = powers.sum(1, keepdim=True)
    return shifted - sums.log(), powers, sums


def gradient_of_scores(gradient: Tensor, powers: Tensor, sums: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The gradient of the scores; `gradient` is that of every row's loss, one number or one per row."""
    counts = labels != ignored
    of_row = torch.where(counts, gradient, 0.0).unsqueeze(1)
    labels = torch.where(counts, labels, 0).unsqueeze(1)
    return (powers * (of_row / sums)).scatter_add(1, labels, -of_row)
