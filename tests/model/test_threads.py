"""Executors in several threads: they do not disturb each other, nor modules and random numbers of the host."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))

    def forward(self, x, y):
        out = self.body(x)
        return out, F.mse_loss(out, y)


def at_once(*functions: Callable[[], object]) -> list[object]:
    """What the functions give when each runs in a thread of its own; raises what one of them raises."""
    results: list[object] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(index: int) -> None:
        try:
            start.wait(30)
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def trained(seed: int, dropout: float = 0.0) -> torch.Tensor:
    """The weights after five calls of a model of its own."""
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(seed)
        model = Net(dropout)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    options = poptorch.Options().randomSeed(seed).replicationFactor(2)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        executor(torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator))
    return model.body[0].weight.detach()


def test_compiling_does_not_notice_modules_that_run_in_another_thread():
    plain, stop = Net(), threading.Event()

    def use_plain() -> None:
        while not stop.is_set():
            plain(torch.ones(2, 3), torch.ones(2, 2))

    def compile_often() -> None:
        try:
            for seed in range(5):
                trained(seed)
        finally:
            stop.set()

    at_once(use_plain, compile_often)


def test_models_in_several_threads_train_as_alone():
    alone = [trained(seed, dropout=0.5) for seed in range(4)]
    together = at_once(*(lambda seed=seed: trained(seed, dropout=0.5) for seed in range(4)))
    assert all(map(torch.equal, alone, together))


def test_first_calls_of_one_executor_at_once_compile_once():
    model = poptorch.inferenceModel(Net())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    results = at_once(*(lambda: model(x, y)[0] for _ in range(4)))
    assert model.compilationReport().startswith("1 program(s)")
    assert all(torch.equal(result, results[0]) for result in results)


def test_calls_of_one_training_executor_at_once_run_one_after_the_other():
    model = Net()
    executor = poptorch.trainingModel(model, optimizer=torch.optim.Adam(model.parameters()))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    at_once(*(lambda: [executor(x, y) for _ in range(10)] for _ in range(4)))
    steps = [state["step"].item() for state in executor._programs.optimizers.optimizers[0].state.values()]
    assert steps == [40.0] * 4


def test_running_a_model_leaves_the_random_numbers_of_the_host_alone_at_every_moment():
    """Also while it runs: another thread draws what it would draw without the model."""
    executor = poptorch.inferenceModel(Net(dropout=0.5), poptorch.Options().deviceIterations(50))
    x, y = torch.randn(200, 3), torch.randn(200, 2)
    executor(x, y)
    torch.manual_seed(5)
    expected = torch.rand(2000)
    torch.manual_seed(5)

    def draw() -> torch.Tensor:
        return torch.cat([torch.rand(1) for _ in range(2000)])

    drawn, _ = at_once(draw, lambda: [executor(x, y) for _ in range(20)])
    assert torch.equal(drawn, expected)
