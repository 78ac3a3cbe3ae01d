"""Which value a training step differentiates.

Every PyTorch loss that `forward` calls, and every `poptorch.identity_loss`, is marked as it is computed. When `forward`
has returned, exactly one marked loss must be left: one that reaches the outputs and flows into no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from poptorch._logging import logger
from poptorch.capture.proxies import node_of
from poptorch.capture.source import current_user_line
from poptorch.errors import LossError, explain
from poptorch.ir import SourceLine
from poptorch.ir.ops import ancestors, unchanged_from

# fmt: off
_NAMES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "linear_cross_entropy",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "nll_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)  # beside these there is one loss that is only a module, see adaptive.py
# fmt: on
BUILT_IN: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name) for owner in (F, torch) for name in _NAMES if hasattr(owner, name)
)


@dataclass(frozen=True)
class Mark:
    """One marked loss: the value to differentiate, the nodes that stand for it, and the user's line."""

    value: torch.Tensor
    nodes: frozenset[fx.Node]  # the loss itself and, for identity_loss, also the tensor that was marked
    origin: fx.Node
    line: SourceLine | None
    name: str
    final: bool = False  # whether the user said that no other loss counts


class LossMarks:
    """The losses that `forward` has computed so far."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def mark(
        self, loss: torch.Tensor, name: str, source: torch.Tensor | None = None, *, final: bool = False
    ) -> torch.Tensor:
        """Remember `loss`, and return a copy: what the user does to it afterwards must not change the marked value."""
        origin = node_of(loss)
        if origin is None:
            return loss
        copied = loss.clone()
        aliases = {origin, node_of(copied), node_of(source) if source is not None else None} - {None}
        self.marks.append(Mark(loss, frozenset(aliases), origin, current_user_line(), name, final))  # pyright: ignore
        return copied


def choose_loss(marks: Sequence[Mark], results: Sequence[fx.Node]) -> torch.Tensor:
    """The one loss that reaches a result of the step and flows into no other loss."""
    live = ancestors(results)
    marks = [mark for mark in marks if mark.final] or marks
    reaching = [mark for mark in marks if mark.nodes & live]
    final = [mark for mark in reaching if not any(_flows_into(mark, other) for other in reaching if other is not mark)]
    if not final:
        raise LossError(_no_loss(marks))
    if len(final) > 1:
        raise LossError(_many_losses(final))
    (mark,) = final
    if not mark.value.requires_grad:
        logger.warning(
            "%s",
            explain(
                f"the loss {mark.name} does not depend on any parameter that requires a gradient: nothing is trained.",
                where=str(mark.line),
                fix="check for detach() or torch.no_grad() on the way, and that the parameters require gradients",
            ),
        )
    if not mark.nodes & {*results, *map(unchanged_from, results)}:
        logger.warning(
            "%s",
            explain(
                f"gradients start at the loss {mark.name}; what is computed from it afterwards does not change them.",
                where=str(mark.line),
                fix="wrap the final value in poptorch.identity_loss to differentiate that instead",
            ),
        )
    return mark.value


def _flows_into(mark: Mark, other: Mark) -> bool:
    return mark.origin is not other.origin and mark.origin in ancestors([other.origin])


def _no_loss(marks: Sequence[Mark]) -> str:
    computed = "; ".join(f"{mark.name} at {mark.line}" for mark in marks)
    details = {"computed": f"{computed}, but not returned"} if computed else {}
    return explain(
        "Couldn't find a loss in graph: a training model returns exactly one loss.",
        **details,
        fix="return a PyTorch loss such as F.cross_entropy(...), or wrap your own value: "
        "poptorch.identity_loss(value, reduction='mean')",
    )


def _many_losses(final: Sequence[Mark]) -> str:
    return explain(
        f"Multiple independent losses found in graph: {len(final)} losses are returned and none contains the others.",
        **{f"loss {index}": f"{mark.name} at {mark.line}" for index, mark in enumerate(final, 1)},
        fix="wrap the value to minimise: poptorch.identity_loss(loss1 + loss2, reduction='none')",
    )
