"""What processes do in tests that have the stages of one model; one process with all stages does the same."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, replace

import torch
from torch import nn

import poptorch
import staged_models
from poptorch.processes import find_place
from staged_models import STRATEGIES, Training, options_for

TOGETHER = ("A", "B", "C", "D")


@dataclass(frozen=True)
class Case:
    """One way to train a model in stages."""

    model: str = "Mlp"
    strategy: str = "pipelined"
    optimizer: str = "SGD"
    accumulation: int = 7
    iterations: int = 1
    replicas: int = 1
    reduction: str = "Post"
    clip_norm: float | None = None
    half: bool = False  # with automatic loss scaling
    recomputation: int | None = None
    seed: int | None = 1
    meta: bool = False  # the processes build the model without values
    per_replica: int | None = None  # processes; None: all of them

    def options(self, *, is_whole):
        strategy = STRATEGIES[self.strategy]()
        if is_whole:
            strategy = poptorch.PipelinedExecution(poptorch.Stage(*TOGETHER).ipu(0))
        options = options_for(strategy, stages=False, replicas=self.replicas).deviceIterations(self.iterations)
        options.engine("eager")
        if self.seed is not None:
            options.randomSeed(self.seed)
        options.Training.gradientAccumulation(self.accumulation)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            getattr(poptorch.MeanReductionStrategy, self.reduction)
        )
        options.Training.setAutomaticLossScaling(self.half)
        if self.clip_norm is not None:
            options.Training.clipGradNorm(self.clip_norm)
        if self.recomputation is not None:
            options._Popart.set("autoRecomputation", self.recomputation)
        if is_whole:
            return options.Distributed.disable() and options
        options.Distributed.processesPerReplica(self.per_replica or find_place().count)
        return options

    @property
    def companies(self):
        """How many processes have the same stages, and which of them this one is."""
        place, per_replica = find_place(), self.per_replica
        return (1, 0) if per_replica is None else (place.count // per_replica, place.index // per_replica)


def build(case, *, is_whole=False):
    torch.manual_seed(0)
    with torch.device("meta" if case.meta and not is_whole else "cpu"):
        model = Training(getattr(staged_models, case.model)())
    return model.half() if case.half else model


def batches(case, calls=2):
    numbers = torch.Generator().manual_seed(1)
    rows = case.iterations * case.accumulation * case.replicas * 2
    shape = getattr(staged_models, case.model).shape
    dtype = torch.float16 if case.half else torch.float32
    for _ in range(calls):
        yield (
            torch.randn(rows, *shape, generator=numbers).to(dtype),
            torch.randn(rows, 6, generator=numbers).to(dtype),
        )


def optimizer_state(model, optimizer):
    """What an optimiser keeps, by the name of the parameter and the key."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        (names[parameter], key): torch.as_tensor(value).clone()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def spread_batches(case, companies, index, calls=2):
    """The rows of each call of one company, or of all of them in the order in which one process takes them."""
    numbers = torch.Generator().manual_seed(1)
    shape = getattr(staged_models, case.model).shape
    for _ in range(calls):
        sizes = (case.iterations * case.accumulation, companies, case.replicas * 2)
        rows = torch.randn(*sizes, *shape, generator=numbers), torch.randn(*sizes, 6, generator=numbers)
        yield tuple(
            (each if index is None else each[:, index]).flatten(0, 1 if index is not None else 2) for each in rows
        )


def train_spread(case, companies=None):
    """Losses, and all weights and state afterwards; `companies` if one process does the work of so many."""
    is_whole, (count, index) = companies is not None, case.companies
    one = replace(case, replicas=case.replicas * (companies or 1))
    options = one.options(is_whole=is_whole)
    torch.manual_seed(0 if is_whole else index)  # the weights of the first company are those that count
    with torch.device("meta" if case.meta and not is_whole else "cpu"):
        model = Training(getattr(staged_models, case.model)())
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options, optimizer)
    given = spread_batches(case, companies or count, None if is_whole else index)
    losses = [training(*batch)[1] for batch in given]
    training.copyWeightsToHost()
    state = optimizer_state(model, optimizer)
    training.destroy()
    return {"losses": losses, "state": state, "weights": model.state_dict()}


def checkpoint(case, folder, until):
    """Train until a call, from the last checkpoint on if there is one, and write one."""
    model = build(case)
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, case.options(is_whole=False), optimizer)
    given = list(spread_batches(case, *case.companies, calls=4))
    training.compile(*given[0])
    done = training.loadCheckpoint(folder) or 0
    for batch in given[done:until]:
        training(*batch)
    training.saveCheckpoint(folder, until)
    training.copyWeightsToHost()
    state = optimizer_state(model, optimizer)
    training.destroy()
    return model.state_dict(), state


def fail_spread(failing):
    """One of the processes is called with a wrong argument once; gives what is raised, and the weights in the end."""
    case = Case(optimizer="Adam", per_replica=2)
    index, texts = case.companies[1], []
    torch.manual_seed(0)
    model = Training(staged_models.Mlp())
    training = poptorch.trainingModel(
        model, case.options(is_whole=False), torch.optim.Adam(model.parameters(), lr=0.05)
    )
    for number, batch in enumerate(spread_batches(case, 2, index, calls=3)):
        if (find_place().index, number) == (failing, 1):
            batch = (batch[0][:, :1], batch[1])
        try:
            training(*batch)
        except poptorch.Error as error:
            texts.append((number, type(error).__name__, error.message))
    training.copyWeightsToHost()
    training.destroy()
    return texts, model.state_dict()


def train(case, *, is_whole=False):
    """Outputs, the weights that are here, and the state that the optimiser has for them."""
    options = case.options(is_whole=is_whole)  # which may seed the numbers that a model starts with
    model = build(case, is_whole=is_whole)
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options, optimizer)
    outputs = [training(*batch) for batch in batches(case)]
    random = training.rng_state
    own = {name: tensor.clone() for name, tensor in model.state_dict().items() if not tensor.is_meta}
    state = optimizer_state(model, optimizer)
    training.copyWeightsToHost()
    everything = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training.destroy()
    return {"outputs": outputs, "own": own, "state": state, "all": everything, "random": random}


def infer(case):
    """What an inference model in stages gives, for a model that all processes have built."""
    model = build(case).model.eval()
    options = case.options(is_whole=False).deviceIterations(4)
    options.Training.gradientAccumulation(1)
    shape = getattr(staged_models, case.model).shape
    x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(1))
    return poptorch.inferenceModel(model, options)(x), model(x).detach()


def go_on_after_copying(case):
    """Copies of the weights of other stages are gone, not old, when the model trains on."""
    model = build(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, case.options(is_whole=False), optimizer)
    first, second = batches(case)
    training(*first)
    training.copyWeightsToHost()
    here = {name for name, tensor in model.state_dict().items() if not tensor.is_meta}
    known = len(optimizer.state)
    training(*second)
    away = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    fewer = len(optimizer.state)
    copied = training.copyWeightsToHostIfNeeded()
    return here, known, away, fewer, copied, {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Fails(staged_models.Mlp):
    """A model whose second process has an error when it is told so."""

    def forward(self, x):
        staged_models.block("A", 0)
        x = self.a(x).relu()
        staged_models.block("C", 3)
        return self.d(self.c(self.b(x)))


def make_failing(*, is_whole):
    torch.manual_seed(0)
    model, case = Training(Fails()), Case(accumulation=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, poptorch.trainingModel(model, case.options(is_whole=is_whole), optimizer), list(batches(case))


def fail_and_go_on(failing):
    """One process cannot take a call; all raise, and the next call is as if nothing had been."""
    model, training, (first, second) = make_failing(is_whole=False)
    training(*first)
    raised = None
    try:
        if find_place().index == failing:
            training(first[0][1:], first[1])
        else:
            training(*first)
    except poptorch.Error as error:
        raised = type(error).__name__, str(error)
    outputs = training(*second)
    training.copyWeightsToHost()
    return raised, outputs, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_twice():
    model, training, (first, second) = make_failing(is_whole=True)
    training(*first)
    return training(*second), model.state_dict()


class TiedApart(staged_models.TiedEmbedding):
    """Stages of different processes share a table."""

    def forward(self, words):
        staged_models.block("A", 0)
        x = self.table(words.abs().mul(10).long() % 6)
        staged_models.block("D", 3)
        return nn.functional.linear(self.one(x).mean(1), self.table.weight)


def refuse(kind, processes, strategy="sharded"):
    """What is raised for a model that cannot be spread like this."""
    model = Training({"tied": TiedApart, "one IPU": nn.Identity}[kind]())
    options = Case(strategy=strategy, accumulation=3).options(is_whole=False)
    options.Distributed.processesPerReplica(processes)
    model.extra = nn.Linear(6, 6)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    shape = (4,) if kind == "tied" else (6,)
    training.compile(torch.randn(6, *shape), torch.randn(6, 6))


class Large(nn.Module):
    """Two stages with weights of many bytes."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, width))
        self.second = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 6))

    def forward(self, x):
        staged_models.block("A", 0)
        x = self.first(x)
        staged_models.block("B", 1)
        return self.second(x)


def data_nbytes():
    """How much private memory this process has."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))


def train_with_limit(width, more_nbytes, *, is_whole):
    """Loss after some calls, if a process may take so much more memory than it has now."""
    torch.manual_seed(0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    begun = data_nbytes()
    resource.setrlimit(resource.RLIMIT_DATA, (begun + more_nbytes, hard))
    try:
        with torch.device("meta"):
            model = Training(Large(width))
        case = Case(accumulation=3)
        training = poptorch.trainingModel(
            model, case.options(is_whole=is_whole), torch.optim.AdamW(model.parameters(), lr=1e-4)
        )
        losses = [training(*batch)[1].sum().item() for batch in batches(case)]
        return losses, data_nbytes() - begun
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def train_until_killed():
    """Train on and on; the second process ends in the middle, without a word."""
    _, training, (first, _) = make_failing(is_whole=False)
    training(*first)
    if find_place().index == 1:
        os._exit(1)
    for _ in range(1000):
        training(*first)
