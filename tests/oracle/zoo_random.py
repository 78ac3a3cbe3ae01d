"""Models that draw random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from oracle.zoo import Supervised, add, case, classification, regression
from oracle.zoo_state import Head

add(
    "Dropout",
    lambda: Supervised(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)),
    regression(4),
    is_random=True,
)
add(
    "OtherDropouts",
    lambda: Supervised(
        nn.Conv2d(1, 4, 2), nn.Dropout2d(0.3), nn.RReLU(), nn.Flatten(), nn.AlphaDropout(0.2), nn.Linear(16, 2)
    ),
    regression(1, 3, 3),
    is_random=True,
)


@case(regression(3), is_random_in_eval=True)
class Draws(Head):
    """Every factory of random numbers, all returned."""

    def forward(self, x, y):
        draws = (
            torch.rand(3),
            torch.randn(x.shape),
            torch.rand_like(x),
            torch.randint(0, 10, (4,)),
            torch.randperm(5),
            torch.bernoulli(torch.full((6,), 0.5)),
            torch.normal(0.0, 1.0, (3,)),
            torch.normal(x.detach(), 0.1),
            x.new_empty(2).uniform_(-1, 1),
            torch.empty(3).exponential_(),
            torch.multinomial(torch.ones(4), 2),
        )
        return *self.finish(x * (0.5 + draws[0]) + 0.1 * draws[1], y), draws


@case(regression(3), is_random=True)
class DropPath(Head):
    """Rows are dropped in training; nothing happens otherwise."""

    def forward(self, x, y):
        if self.training:
            x = x * torch.bernoulli(torch.full((x.shape[0], 1), 0.7)) / 0.7
        return self.finish(x, y)


@case(regression(4, target=(4,)), is_random_in_eval=True)
class VariationalAutoencoder(nn.Module):
    """torch.distributions with checks of their arguments, reparametrised samples, a KL term."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x, y):
        mean, log_scale = self.encode(x).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, log_scale.exp())
        out = self.decode(posterior.rsample())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        return out, poptorch.identity_loss(F.mse_loss(out, y) + 0.1 * divergence, reduction="none")


@case(classification(4), is_random_in_eval=True)
class GumbelSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.values = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x, label):
        picked = F.gumbel_softmax(self.choose(x), tau=0.7, hard=True)
        out = self.values(picked)
        return out, F.cross_entropy(out, label), picked


@case(classification(4), is_random_in_eval=True)
class PolicyGradient(nn.Module):
    """Samples actions from a categorical distribution and learns from their log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(4, 3)

    def forward(self, x, label):
        actions = torch.distributions.Categorical(logits=self.policy(x))
        action = actions.sample()
        reward = (action == label).float()
        loss = -(actions.log_prob(action) * reward).mean() - 0.01 * actions.entropy().mean()
        return action, poptorch.identity_loss(loss, reduction="none"), reward


@case(regression(4), is_random=True)
class DroppedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(1, 6), nn.Linear(8, 2)

    def forward(self, x, y):
        q, k, v = self.project(x.unsqueeze(-1)).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        out = self.head(out.flatten(1))
        return out, F.mse_loss(out, y)


@case(regression(3), is_random=True)
class UnusedDraw(Head):
    """A draw that nothing uses still moves the stream on."""

    def forward(self, x, y):
        torch.rand(7)
        return self.finish(F.dropout(x, 0.5, self.training), y)
