"""Replicas exchange values through custom ops of the domain `ai.graphcore`."""

from __future__ import annotations

import torch
from torch import nn

import poptorch


class Gather(nn.Module):
    def forward(self, x):
        (everything,) = poptorch.custom_op([x], "ReplicatedAllGather", "ai.graphcore", 1, example_outputs=[x])
        return everything.sum(0)


class Reduce(nn.Module):
    def forward(self, x):
        attributes = {"op": "sum"}
        (total,) = poptorch.custom_op(
            [x], "ReplicatedAllReduceTP", "ai.graphcore", 1, example_outputs=[x], attributes=attributes
        )
        return total


def run(model, x):
    return poptorch.inferenceModel(model, poptorch.Options().replicationFactor(2))(x)


def test_each_replica_sees_the_values_of_all():
    x = torch.arange(8.0).view(4, 2)
    total = x[:2] + x[2:]
    assert torch.equal(run(Gather(), x), torch.cat([total, total]))


def test_replicas_add_up_their_values():
    x = torch.arange(8.0).view(4, 2)
    total = x[:2] + x[2:]
    assert torch.equal(run(Reduce(), x), torch.cat([total, total]))
