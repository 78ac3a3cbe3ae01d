"""Models that differ in their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from oracle.zoo import add, case, classification, normal, regression
from oracle.zoo_state import Head


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)


@case(classification(4))
class TwoNllWrapped(Classifier):
    """The example of the documentation."""

    def forward(self, x, label):
        out = F.log_softmax(self.fc(x), dim=1)
        loss = F.nll_loss(out, label) + 5 * F.nll_loss(out, label)
        return out, poptorch.identity_loss(loss, reduction="none")


class IdentityLoss(Head):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x, y):
        out = self.fc(x)
        return out, poptorch.identity_loss(0.1 * (out - y).pow(2).sum(1), reduction=self.reduction)


for _reduction in ("mean", "sum", "none"):
    add(f"IdentityLoss_{_reduction}", lambda r=_reduction: IdentityLoss(r), regression(3))


@case(regression(3))
class IdentityLossThrownAway(Head):
    """The mark stays on the value itself."""

    def forward(self, x, y):
        out = self.fc(x)
        loss = (out - y).abs().mean()
        poptorch.identity_loss(loss, reduction="none")
        return out, loss


@case(regression(3), loss=lambda r: r[1].mean())
class IdentityLossOfRowsThrownAway(Head):
    def forward(self, x, y):
        out = self.fc(x)
        errors = (out - y).pow(2).sum(1)
        poptorch.identity_loss(errors, reduction="mean")
        return out, errors


@case(regression(3), loss=lambda r: r[1] / 5)
class LossScaledAfterwards(Head):
    """Gradients start at the marked loss: the factor changes what is returned, not what is learnt."""

    def forward(self, x, y):
        out = self.fc(x)
        return out, F.mse_loss(out, y) * 5


@case(classification(4))
class CrossEntropyWithEverything(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1, ignore_index=2)

    def forward(self, x, label):
        out = self.fc(x)
        return out, self.loss(out, label)


@case(lambda g: ((normal(g, 4), (normal(g, 3) > 0).float()), {}))
class BinaryLosses(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x, y):
        out = self.fc(x)
        probability = out.sigmoid()
        loss = self.loss(out, y) + F.binary_cross_entropy(probability, y, reduction="sum")
        return probability, poptorch.identity_loss(loss, reduction="mean")


@case(regression(4, target=(3,)))
class ManyLosses(Classifier):
    """Losses that poptorch marks and that torch only has as functions, in one sum."""

    def forward(self, x, y):
        out = self.fc(x)
        sign = torch.where(y[:, 0] > 0, 1.0, -1.0)
        loss = (
            F.l1_loss(out, y)
            + F.smooth_l1_loss(out, y, beta=0.5)
            + F.huber_loss(out, y, delta=0.5)
            + F.kl_div(out.log_softmax(1), y.softmax(1), reduction="batchmean")
            + F.poisson_nll_loss(out, y.abs())
            + F.hinge_embedding_loss(out, sign.unsqueeze(1).expand_as(out))
            + F.margin_ranking_loss(out[:, 0], out[:, 1], sign)
            + F.soft_margin_loss(out[:, 0], sign)
            + F.cosine_embedding_loss(out, y, sign)
            + F.triplet_margin_loss(out, y, x[:, :3])
            + F.gaussian_nll_loss(out, y, out.exp() + 0.1)
            + F.multi_margin_loss(out, y.argmax(1))
            + F.multilabel_soft_margin_loss(out, (y > 0).float())
        )
        return out, poptorch.identity_loss(loss, reduction="none")


@case(lambda g: ((normal(g, 6, 4), torch.randint(1, 3, (4, 2), generator=g)), {}))
class Ctc(Classifier):
    def forward(self, x, labels):
        out = self.fc(x).log_softmax(-1).transpose(0, 1)
        return out, F.ctc_loss(out, labels, [6] * x.shape[0], [2] * x.shape[0])


@case(regression(4, target=(4,)), loss=lambda r: r["loss"])
class Contrastive(nn.Module):
    """A loss over all pairs of a batch, with a learnt temperature and labels made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        logits = a @ b.t() * self.temperature.exp()
        labels = torch.arange(x.shape[0], device=x.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return {"logits": logits, "loss": poptorch.identity_loss(loss, reduction="none")}


@case(regression(3))
class SumOfBuiltInThroughIdentity(Head):
    """A marked loss that flows into another one is an ordinary value."""

    def forward(self, x, y):
        out = self.fc(x)
        inner = poptorch.identity_loss((out - y).pow(2), reduction="sum")
        return out, poptorch.identity_loss(inner + F.l1_loss(out, y), reduction="mean"), inner
