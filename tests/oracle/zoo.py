"""Small models of every awkward kind, each with its data and its optimiser.

A case is all that a test needs to train the same model twice, once through poptorch and once in plain PyTorch.
The models are in the `zoo_*` modules next to this one, by subject; `CASES` lists them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS = 4  # of one micro-batch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Batch = Callable[[torch.Generator], Arguments]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


@dataclass(frozen=True)
class Case:
    """A model, and how to train it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Batch  # the arguments of one micro-batch
    loss: Callable[[Any], torch.Tensor]  # what training differentiates, found in what forward returns
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    is_random: bool  # draws random numbers in training mode
    is_random_in_eval: bool

    def build(self, seed: int = 0) -> nn.Module:
        """The module with initial weights that depend on the seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with warnings.catch_warnings():  # old parts of torch say that they are old
                warnings.simplefilter("ignore")
                return self.make()

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def second(result: Any) -> torch.Tensor:
    return result[1]


def add(
    name: str,
    make: Callable[[], nn.Module],
    batch: Batch,
    *,
    loss: Callable[[Any], torch.Tensor] = second,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    is_random: bool = False,
    is_random_in_eval: bool = False,
) -> None:
    """Put a model into the zoo."""
    CASES.append(Case(name, make, batch, loss, optimizer, is_random or is_random_in_eval, is_random_in_eval))


def case(batch: Batch, **how: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Put the decorated module class into the zoo, under its own name."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        add(kind.__name__, kind, batch, **how)
        return kind

    return register


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=generator)


def integers(generator: torch.Generator, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, (ROWS, *shape), generator=generator)


def regression(*inputs: int, target: tuple[int, ...] = (2,)) -> Batch:
    """`x` of this shape per row, and a target."""
    return lambda g: ((normal(g, *inputs), normal(g, *target)), {})


def classification(*inputs: int, classes: int = 3) -> Batch:
    return lambda g: ((normal(g, *inputs), integers(g, classes)), {})


def tokens(length: int, vocabulary: int, target: tuple[int, ...] = (2,)) -> Batch:
    return lambda g: ((integers(g, vocabulary, length), normal(g, *target)), {})


class Supervised(nn.Module):
    """A body of layers with the mean squared error."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(x)
        return out, nn.functional.mse_loss(out, y)


def find(*names: str) -> list[Case]:
    """The cases with these names, in this order."""
    by_name = {case.name: case for case in all_cases()}
    return [by_name[name] for name in names]


def all_cases() -> list[Case]:
    """Every case of the zoo."""
    from oracle import (  # noqa: F401
        zoo_autograd,
        zoo_layers,
        zoo_losses,
        zoo_paths,
        zoo_python,
        zoo_random,
        zoo_state,
        zoo_structures,
    )

    names = [case.name for case in CASES]
    assert len(set(names)) == len(names), "two cases have the same name"
    return CASES
