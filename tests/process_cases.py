"""What processes of a program do in tests; one process with all replicas does the same, to compare."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import poptorch
from poptorch.model.processes import Companions
from poptorch.options import resolve
from poptorch.processes import connect, find_place

ROWS = 3  # of a micro-batch


class Net(nn.Module):
    """Layers with statistics and with random numbers."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        first = nn.Linear(4, 8, bias=False)  # what follows would make the gradient of a bias zero, but for rounding
        self.layers = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 2)).to(dtype)

    def forward(self, x, target):
        y = self.layers(x)
        return y, nn.functional.mse_loss(y, target)


@dataclass(frozen=True)
class Case:
    """One way to train `Net`."""

    optimizer: str = "SGD"
    arguments: tuple[tuple[str, object], ...] = ()
    accumulation: int = 1
    replicas: int = 1  # of each process
    reduction: str = "Mean"
    strategy: str = "Post"
    clip_norm: float | None = None
    half: bool = False  # with automatic loss scaling
    iterations: int = 1
    in_order: bool = True
    wide: bool = False
    engine: str = "eager"
    steps: int = 2
    sharded: bool = False  # the optimiser's state by rows

    def options(self):
        options = poptorch.Options().replicationFactor(self.replicas).deviceIterations(self.iterations)
        options.runSideBySide(self.wide).randomSeed(3).engine(self.engine)
        options.Training.gradientAccumulation(self.accumulation)
        options.Training.accumulationAndReplicationReductionType(getattr(poptorch.ReductionType, self.reduction))
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            getattr(poptorch.MeanReductionStrategy, self.strategy)
        )
        if self.clip_norm:
            options.Training.clipGradNorm(self.clip_norm)
        options.Training.setAutomaticLossScaling(self.half)
        options.Distributed.orderedReduction(self.in_order)
        if self.sharded:
            by_rows = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
            options.TensorLocations.setOptimizerLocation(by_rows.minElementsForReplicatedTensorSharding(8))
        return options

    def make(self, module):
        kind = getattr(torch.optim, self.optimizer, None) or getattr(poptorch.optim, self.optimizer)
        return kind(module.parameters(), **dict(self.arguments))

    def in_one_process(self, processes):
        return replace(self, replicas=self.replicas * processes)


def batches(case, processes, process=None):
    """The rows of each call: of one process, or of all replicas in the order in which one process takes them."""
    numbers = torch.Generator().manual_seed(11)
    for _ in range(case.steps):
        shape = (case.iterations * case.accumulation, processes, case.replicas * ROWS)
        rows = torch.randn(*shape, 6, generator=numbers)
        rows = (rows if process is None else rows[:, process]).reshape(-1, 6)
        rows = rows.half() if case.half else rows
        yield rows[:, :4].contiguous(), rows[:, 4:].contiguous()


def train(case, processes=None):
    """State, loss and scale after some steps; `processes` if one process does the work of so many."""
    here = find_place()
    torch.manual_seed(0 if processes else here.index)  # the weights of the first process are those that count
    module = Net(torch.float16 if case.half else torch.float32)
    options = case.options() if processes is None else case.in_one_process(processes).options()
    if processes is not None:
        options.Distributed.disable()
    optimizer = case.make(module)
    training = poptorch.trainingModel(module, options, optimizer)
    count = here.count if processes is None else processes
    losses = [training(*batch)[1].tolist() for batch in batches(case, count, None if processes else here.index)]
    has_rows = training.copyWeightsToHostIfNeeded()
    training.destroy()
    return {"state": module.state_dict(), "losses": losses, "optimizer": flat(optimizer), "has_rows": has_rows}


def flat(optimizer):
    """The tensors of an optimiser's state, by the position of the parameter and the key."""
    entries = optimizer.state_dict()["state"].items()
    return {f"{index}.{key}": value for index, each in entries for key, value in each.items()}


def train_all(cases):
    return [train(case) for case in cases]


class Lookup(nn.Module):
    """A table, whose indices may be wrong."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, index):
        y = self.table(index)
        return y, poptorch.identity_loss(y.pow(2).sum(), reduction="none")


def lookups(engine="eager"):
    """A training model on `Lookup`."""
    torch.manual_seed(1)
    module = Lookup()
    options = poptorch.Options().engine(engine)
    return module, poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))


def raise_once(rank):
    """One process has a wrong index in its second step: nobody takes that step, and all go on."""
    module, training = lookups()
    here, texts = find_place().index, []
    for step in range(3):
        index = 9 if (here, step) == (rank, 1) else here
        try:
            training(torch.tensor([index, 0]))
        except poptorch.Error as error:
            texts.append(f"{type(error).__name__} in step {step}: {error.message}")
    return texts, module.table.weight.detach()


class Guarded(nn.Module):
    """A layer that reads a value, which later batches may contradict."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return poptorch.identity_loss(self.fc(x), reduction="sum")


def contradict_once(rank):
    """The second batch of one process contradicts the first, which its program only finds out when it has run."""
    here, texts = find_place().index, []
    torch.manual_seed(1)
    module = Guarded()
    training = poptorch.trainingModel(
        module, poptorch.Options().engine("eager"), torch.optim.SGD(module.parameters(), 0.1)
    )
    for step in range(3):
        sign = -1.0 if (here, step) == (rank, 1) else 1.0
        try:
            training(torch.full((1, 2), sign * (step + 1)))
        except poptorch.Error as error:
            texts.append(f"{type(error).__name__} in step {step}: {error.message}")
    return texts, module.fc.weight.detach()


def save_on_all_but(rank, folder):
    """One process cannot write the second checkpoint, nor name its progress in the third; all go on after that."""
    from torch.distributed.checkpoint import FileSystemWriter

    _, training = lookups()
    here, texts = find_place().index, []
    training(torch.tensor([0]))
    training.saveCheckpoint(folder, 1)
    write = FileSystemWriter.write_data
    for attempt in (2, 3, 4):
        if (here, attempt) == (rank, 2):
            FileSystemWriter.write_data = _is_full  # pyright: ignore[reportAttributeAccessIssue]
        progress = {1, 2} if (here, attempt) == (rank, 3) else attempt
        try:
            training.saveCheckpoint(folder, progress)
        except (poptorch.Error, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        FileSystemWriter.write_data = write
        if attempt == 3:
            texts.append(training.loadCheckpoint(folder))
    return texts, training.loadCheckpoint(folder)


def _is_full(*_):
    raise OSError(28, "No space left on device")


def advise_caching(caches):
    """What is said about the cache when processes connect that compile native code."""
    settings = resolve(poptorch.Options(), training=True)
    settings = replace(settings, files=replace(settings.files, caches=caches))
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        Companions(nn.Linear(1, 1), settings).connect("inductor")
    return written.getvalue()


def compile_on_all_but(rank):
    """One process cannot compile the model."""
    module, training = lookups()
    if find_place().index == rank:
        module.table = None  # pyright: ignore[reportAttributeAccessIssue]
    training(torch.tensor([1, 0]))


def compile_differently():
    """The processes do not agree on how large a batch is."""
    _, training = lookups()
    training(torch.arange(1 + find_place().index))


def train_until(rank, step, what, seconds=60.0):
    """One process stops taking part at a step; gives what the others say, how long it took, and their weights."""
    module, training = lookups()
    weights = module.table.weight.detach().clone()
    here = find_place().index
    for number in range(1000):
        if (here, number) == (rank, step):
            _fail(what, seconds)
        begun = time.monotonic()
        try:
            training(torch.tensor([here, number % 8]))
        except poptorch.Error as error:
            same = torch.equal(module.table.weight, weights)
            return number, f"{type(error).__name__}: {error.message}", time.monotonic() - begun, same
        weights = module.table.weight.detach().clone()
    return None


def train_for_long():
    """Say when training has begun, and what ended it."""
    _, training = lookups()
    training(torch.tensor([0]))
    print("training", flush=True)
    try:
        while True:
            training(torch.tensor([1]))
            time.sleep(0.01)
    except poptorch.Error as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)


def _fail(what, seconds):
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)  # the line at which it stalls


def resume(folder):
    """The loss of `examples/resume.py`."""
    path = Path(__file__).parents[1] / "examples" / "resume.py"
    return runpy.run_path(str(path))["train"](folder, epochs=4)


def go_on_from_file(folder, shared):
    """Weights after four steps, and after four steps of which the last two are done by a program from a file."""
    here, case = find_place().index, Case("Adam", replicas=2, in_order=False, steps=4)
    torch.manual_seed(0)
    module = Net()
    training = poptorch.trainingModel(module, case.options(), case.make(module))
    given = list(batches(case, 2, here))
    for batch in given[:2]:
        training(*batch)
    if not shared or here == 0:
        training.save(folder / f"{0 if shared else here}.poptorch")
    for batch in given[2:]:
        training(*batch)
    loaded = poptorch.load(folder / f"{0 if shared else here}.poptorch")
    drawn = [loaded.rng_state]
    for batch in given[2:]:
        loaded(*batch)
    training.destroy()
    return module.state_dict(), loaded.model.state_dict(), drawn


def load_what_is_not_there(folder):
    """One process has no file."""
    here, case = find_place().index, Case()
    module = Net()
    training = poptorch.trainingModel(module, case.options(), case.make(module))
    if here == 0:
        training.loadExecutable(folder / "none.poptorch")
    training.loadExecutable(folder / f"{here}.poptorch")


def look(folder):
    """What a program of several processes sees: its part of the data, an anchor, counters and its log."""
    os.environ["POPTORCH_LOG_DEST"] = "stdout"
    options = poptorch.Options().deviceIterations(2).randomSeed(1).engine("eager")
    options.anchorTensor("sums", "table.weight")
    rows = torch.utils.data.TensorDataset(torch.arange(16) % 8)
    loader = poptorch.DataLoader(options, rows, batch_size=2, drop_last=True)
    torch.manual_seed(1)
    module = Lookup()
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    seen = [training(*batch) and batch[0].tolist() for batch in loader]
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        poptorch._logging.logger.warning("a warning")
        poptorch._logging.logger.error("an error")
    found = {
        "rows": seen,
        "anchor": training.getAnchoredTensor("sums"),
        "weight": module.table.weight.detach(),
        "latency": training.getLatency(),
        "log": written.getvalue(),
        "schedule": str(training._programs.compiled().session.executable.schedule),
    }
    training.destroy()
    return found


def compile_natively(folder):
    """How many programs this process compiled, and the weights after a step."""
    os.environ.update(POPTORCH_CACHE="1", POPTORCH_CACHE_DIR=str(folder), POPTORCH_ENGINE="inductor")
    from poptorch.engines import choose_engine

    engine = choose_engine("inductor")
    compiled, compile_ = [], type(engine).compile

    def count(self, programs, *more):
        compiled.append(len(programs))
        return compile_(self, programs, *more)

    type(engine).compile = count  # pyright: ignore[reportAttributeAccessIssue]
    try:
        module, training = lookups("inductor")
        training(torch.tensor([0, 1]))
    finally:
        type(engine).compile = compile_
    return compiled, module.table.weight.detach()


def stall_then_go_on(seconds):
    """What the processes say if one comes late, that one included."""
    _, training = lookups()
    here = find_place().index
    training(torch.tensor([here]))
    if here == 1:
        time.sleep(seconds)
    try:
        training(torch.tensor([here]))
    except poptorch.Error as error:
        return error.message
    return ""


def agree_and_leave(seconds):
    """The first process ends as soon as all have agreed, and the store ends with it; the others take their time."""
    here = find_place()
    group = connect(here.index, here.count)
    if here.index:
        look = group._board.has
        group._board.has = lambda name: (time.sleep(seconds), look(name))[1]
    group.agree("testing")
    if here.index == 0:
        group.close()
        os._exit(0)
    return "agreed"


def fail_and_leave(seconds):
    """Process 1 dies. The first one ends as soon as it knows, and the store ends with it; others look later."""
    _, training = lookups()
    here, group = find_place(), connect(find_place().index, find_place().count)
    training(torch.tensor([0]))
    if here.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    look = group._culprit
    group._culprit = lambda: (time.sleep(seconds * here.index), look())[1]
    try:
        training(torch.tensor([0]))
    except poptorch.Error as error:
        if here.index == 0:
            group.close()
            os._exit(0)
        return error.message
    return ""


def raise_then(rank, other):
    """One process raises once and all go on; later another one dies. Gives what is said last."""
    _, training = lookups()
    here, texts = find_place().index, []
    for step in range(4):
        if (here, step) == (other, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            training(torch.tensor([9 if (here, step) == (rank, 1) else 0]))
        except poptorch.Error as error:
            texts.append(error.message)
    return texts


def in_rows(case=None, **more):
    """A module, its optimiser and a training model whose optimiser state is shared out by rows."""
    case = case or Case("Adam", (("lr", 0.01),), in_order=False, sharded=True, steps=6, **more)
    torch.manual_seed(0)
    module = Net()
    optimizer = case.make(module)
    return case, module, optimizer, poptorch.trainingModel(module, case.options(), optimizer)


def memory_of_state():
    """Where the optimiser shows its state to be, how many bytes of it this process has, and the number of steps."""
    module = nn.Linear(40, 60, bias=False)
    options = Case(sharded=True).options()
    optimizer = torch.optim.Adam(module.parameters())
    training = poptorch.trainingModel(Loss(module), options, optimizer)
    training(torch.ones(2, 40))
    (entries,) = optimizer.state.values()
    kept = sum(rows.tensor.nbytes for rows in training._programs.compiled().state.rows)
    training.destroy()
    return entries["exp_avg"].device.type, kept, int(entries["step"])


class Loss(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x).pow(2), reduction="mean")


def checkpoint(folder, until, steps):
    """Train until a step, from the last checkpoint on if there is one, and write one there."""
    case, module, optimizer, training = in_rows()
    here = find_place()
    given = list(batches(case, here.count, here.index))[:steps]
    training.compile(*given[0])
    progress = training.loadCheckpoint(folder)
    for batch in given[progress["step"] if progress else 0 : until]:
        training(*batch)
    training.saveCheckpoint(folder, {"step": max(until, progress["step"] if progress else 0)})
    training.copyWeightsToHost()
    training.destroy()
    return {"state": module.state_dict(), "optimizer": flat(optimizer), "progress": progress}


def explain_rows():
    """What is said about optimiser state that was taken without its rows, and about a file."""
    case, _, optimizer, training = in_rows()
    here, texts = find_place(), []
    batch = next(batches(case, here.count, here.index))
    training(*batch)
    entries = next(iter(optimizer.state.values()))
    entries["exp_avg"] = entries["exp_avg"].clone()
    for attempt in (lambda: training(*batch), lambda: training.save("never.poptorch")):
        try:
            attempt()
        except poptorch.Error as error:
            texts.append(error.message)
    training.destroy()
    return texts
