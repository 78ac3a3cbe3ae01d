"""The optimisers of a training model: their plans, what is said about them, and what the program shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.errors import Error, OptimizerValueError, explain, nearest
from poptorch.optim import Optimizer
from poptorch.optim.attributes import AttributeWatch
from poptorch.optim.description import describe
from poptorch.optim.plan import GroupPlan, OptimizerPlan
from poptorch.optim.view import ProgramView
from poptorch.options import Anchor, Options, Settings

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer] | tuple[torch.optim.Optimizer, ...]
_groups_of, _is_dirty = attrgetter("param_groups"), attrgetter("ipu_state_is_dirty")


class OptimizerSet:
    """The optimisers that a model has now, in the user's order, each with its plan."""

    def __init__(self) -> None:
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.plans: tuple[OptimizerPlan, ...] = ()
        self._own: list[Optimizer] = []  # those that are ours
        self._group_counts: list[int] = []
        self._watches: dict[int, AttributeWatch] = {}
        self._described: list[str] = []
        self._views: list[ProgramView] = []

    def __iter__(self) -> Iterator[tuple[torch.optim.Optimizer, OptimizerPlan]]:
        return zip(self.optimizers, self.plans, strict=True)

    def become(self, optimizers: tuple[torch.optim.Optimizer, ...], plans: tuple[OptimizerPlan, ...]) -> None:
        """Go on with these, each with its plan."""
        self.optimizers, self.plans = optimizers, plans
        self._group_counts = [len(plan.groups) for plan in plans]
        self._own = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]

    @property
    def is_dirty(self) -> bool:
        """Whether one of them has loaded a state dictionary that the program has not seen."""
        return any(map(_is_dirty, self._own))

    @property
    def has_other_groups(self) -> bool:
        """Whether groups of parameters were added or removed of which the program does not know."""
        return list(map(len, map(_groups_of, self.optimizers))) != self._group_counts

    def mark_step(self) -> None:
        """LR schedulers warn if nobody took a step."""
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # pyright: ignore

    def report(self, module: nn.Module, *, quietly: bool) -> None:
        """Warn about attributes that nothing reads, and log the numbers that changed."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        lines: list[str] = []
        for index, (optimizer, plan) in enumerate(self):
            self._watches.setdefault(index, AttributeWatch()).look(optimizer, quietly=quietly)
            tensors = [[names.get(id(p), "?") for p in group.params] for group in plan.groups]
            lines += describe(plan, tensors)
        for line in lines:
            if line not in self._described:
                logger.debug("%s", line)
        self._described = lines

    def connect(
        self,
        trained: Sequence[Mapping[str, tuple[nn.Parameter, GroupPlan]]],
        scale_factor: torch.Tensor | None,
        replica_groups: Mapping[str, int],
        settings: Settings,
    ) -> None:
        """Let PopTorch's optimisers show what the program knows about them in their `state_dict()`.

        `trained` has the parameters that the program trains for each optimiser, `scale_factor` is what automatic loss
        scaling multiplies the loss scaling with.
        """
        is_mean = settings.training.reduction is ReductionType.Mean
        divisor = settings.batching.micro_batches_per_update if is_mean else 1
        self._views = []
        for index, (optimizer, plan) in enumerate(self):
            view = ProgramView(plan, dict(trained[index]), divisor, scale_factor, dict(replica_groups))
            if view.has_names_for(plan):
                self._views.append(view)
            if isinstance(optimizer, Optimizer):
                optimizer._connect(view)
                optimizer.ipu_state_is_dirty = False

    def numbers(self) -> dict[str, torch.Tensor]:
        """The numbers that the program has from the optimisers, by the names that they have on an IPU."""
        return {name: number for view in self._views for name, number in view.numbers().items()}

    def anchored(self, anchors: Mapping[str, Anchor]) -> dict[str, torch.Tensor]:
        """The numbers that anchors ask for; a call uses the same in all of its micro-batches."""
        wanted = {short: anchor.long_name for short, anchor in anchors.items() if is_number(anchor.long_name)}
        numbers = self.numbers() if wanted else {}
        for short, name in wanted.items():
            if name not in numbers:
                raise Error(
                    f"anchorTensor({short!r}, …) asks for {name!r}, which the optimiser does not have"
                    f"{nearest(name, numbers)}. getTensorNames() lists all names."
                )
        return {short: numbers[name] for short, name in wanted.items()}


GROUPS_CHANGED = (
    "the optimiser has other groups of parameters than when it was handed over: call setOptimizer, the program goes on "
    "with those that there were."
)


def is_number(name: str) -> bool:
    """Whether a tensor of this name comes from an optimiser and not from the graph."""
    return name == "lossScaling_FLOAT" or "___specific___" in name


def needs_running_mean(plans: Sequence[OptimizerPlan], settings: Settings, *, is_compiled: bool) -> bool:
    """Whether gradients must be averaged as they come: sums of float16 gradients overflow."""
    chosen, running = settings.training.mean_reduction, MeanReductionStrategy.Running
    if chosen is running or not any(plan.accum_type is torch.float16 for plan in plans):
        return False
    if is_compiled:
        raise OptimizerValueError(
            explain(
                f"the model is already compiled with meanAccumulationAndReplicationReductionStrategy {chosen.name}, "
                "but accum_type=torch.float16 needs Running.",
                fix="call destroy() first, which lets the model compile again",
            )
        )
    return True


def with_running_mean(options: Options) -> Options:
    """The same options, frozen, with gradients averaged as they come."""
    changed = options.clone()
    changed.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    changed._freeze()
    return changed
