"""Weights that differ between groups of replicas.

On the host such a weight has one more dimension in front, with one entry per group; a replica sees the entry of its
group. The program is captured for one entry, and every replica is bound to the memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import Error, explain, nearest
from poptorch.executable import Grouping
from poptorch.interrupts import run_and_undo
from poptorch.options import Settings
from poptorch.options.checks import integer, member

T = TypeVar("T")


class ReplicaGroups(NamedTuple):
    """What `replicaGrouping` was told about one parameter: `shards` replicas form a group.

    The replicas of a group share one tensor, so `retrieval` is recorded only: reading one replica of each group or all
    of them gives the same values, and the host has one entry per group in either mode.
    """

    kind: CommGroupType
    shards: int
    retrieval: VariableRetrievalMode

    @classmethod
    def checked(
        cls, kind: object, shards: object, retrieval: object = VariableRetrievalMode.OnePerGroup
    ) -> ReplicaGroups:
        return cls(
            member("replicaGrouping comm_group_type", kind, CommGroupType),
            integer("replicaGrouping shards", shards),
            member("replicaGrouping variable_retrieval_mode", retrieval, VariableRetrievalMode),
        )

    def of_replicas(self, name: str, replicas: int) -> tuple[int, ...]:
        """The group of each replica."""
        if self.kind is CommGroupType.NoGrouping:
            return tuple(range(replicas))
        if self.kind is CommGroupType.All:
            return (0,) * replicas
        if self.shards < 1 or replicas % self.shards:
            raise Error(
                explain(
                    f"replicaGrouping of {name} puts {self.shards} replicas into a group, "
                    f"which do not divide the {replicas} that there are.",
                    fix="choose a number of replicas per group that divides replicationFactor",
                )
            )
        groups = replicas // self.shards
        consecutive = self.kind is CommGroupType.Consecutive
        return tuple(replica // self.shards if consecutive else replica % groups for replica in range(replicas))


def plan_groupings(
    parameters: Mapping[str, nn.Parameter], groups: Mapping[str, tuple[Any, ...]], settings: Settings
) -> tuple[Grouping, ...]:
    """Which replica sees which part of which parameter; the parameters must have these parts."""
    planned: list[Grouping] = []
    for name, told in groups.items():
        group = _checked(parameters, name, told)
        if group.kind is CommGroupType.All:
            continue  # all replicas share it, as they do without a grouping
        of_replicas = group.of_replicas(name, settings.batching.replicas)
        count, shape = max(of_replicas) + 1, list(parameters[name].shape)
        if not shape or shape[0] != count:
            raise Error(
                explain(
                    f"parameter {name} has shape {shape}, but replicaGrouping makes {count} groups of replicas.",
                    fix=f"give it a first dimension of {count}, with the weight of one group in each entry",
                )
            )
        planned.append(Grouping(name, of_replicas))
    if planned and (settings.training.clip_norm or settings.training.automatic_loss_scaling):
        raise Error(
            "weights with a replicaGrouping cannot be trained with gradient norm clipping or automatic loss scaling."
        )
    return tuple(planned)


def _checked(parameters: Mapping[str, nn.Parameter], name: str, told: Any) -> ReplicaGroups:
    """What `per_replica_params` says about a parameter; programs may have put a plain tuple there."""
    if name not in parameters:
        raise Error(f"replicaGrouping of {name!r}: the model has no such parameter{nearest(name, parameters)}.")
    if not isinstance(told, tuple) or len(told) not in (2, 3):
        raise Error(
            explain(
                f"per_replica_params[{name!r}] is {told!r}.",
                fix="set (CommGroupType, shards, VariableRetrievalMode), or call replicaGrouping on the parameter",
            )
        )
    return ReplicaGroups.checked(*told)


def run_on_one_group(
    parameters: Mapping[str, nn.Parameter], groupings: tuple[Grouping, ...], body: Callable[[], T]
) -> T:
    """Run a function while every grouped parameter is the weight of its first group, as `forward` sees it."""
    whole = {grouping.name: parameters[grouping.name].data for grouping in groupings}

    def run() -> T:
        for name, tensor in whole.items():
            parameters[name].data = tensor[0]
        return body()

    def undo() -> None:
        for name, tensor in whole.items():
            parameters[name].data = tensor

    return run_and_undo(run, undo)
