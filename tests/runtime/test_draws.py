"""Random numbers that a user's own generator gives: the same as outside of a model, on every engine."""

from __future__ import annotations

import pytest
import torch

import poptorch
from models import Apply

Generator = torch.Generator
aten = torch.ops.aten

DRAWS = {
    "rand": lambda x, g: torch.rand(4, generator=g),
    "double": lambda x, g: torch.rand(4, generator=g, dtype=torch.float64).float(),
    "half": lambda x, g: torch.rand(4, generator=g, dtype=torch.float16),
    "complex": lambda x, g: torch.randn(4, generator=g, dtype=torch.complex64),
    "randn": lambda x, g: torch.randn(4, generator=g),
    "randint": lambda x, g: torch.randint(9, (4,), generator=g, dtype=torch.int32),
    "randint from": lambda x, g: torch.randint(-3, 9, (4,), generator=g).int(),
    "randperm": lambda x, g: torch.randperm(4, generator=g, dtype=torch.int32),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "bernoulli p": lambda x, g: torch.bernoulli(x, 0.3, generator=g),
    "bernoulli_": lambda x, g: torch.empty_like(x).bernoulli_(0.3, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 3, generator=g).int(),
    "normal mean": lambda x, g: torch.normal(x, 2.0, generator=g),
    "normal deviation": lambda x, g: torch.normal(2.0, x, generator=g),
    "normal both": lambda x, g: torch.normal(x, x, generator=g),
    "normal numbers": lambda x, g: torch.normal(2.0, 3.0, (4,), generator=g),
    "normal_": lambda x, g: torch.empty_like(x).normal_(1, 2, generator=g),
    "uniform_": lambda x, g: torch.empty_like(x).uniform_(1, 2, generator=g),
    "exponential_": lambda x, g: torch.empty_like(x).exponential_(2.0, generator=g),
    "exponential_ on a part": lambda x, g: _draw_into_a_part(x, g),
    "geometric_": lambda x, g: torch.empty_like(x).geometric_(0.2, generator=g),
    "cauchy_": lambda x, g: torch.empty_like(x).cauchy_(0.2, 2, generator=g),
    "log_normal_": lambda x, g: torch.empty_like(x).log_normal_(0.2, 2, generator=g),
    "random_": lambda x, g: torch.empty_like(x).random_(generator=g),
    "random_ to": lambda x, g: torch.empty_like(x).random_(5, generator=g),
    "random_ from": lambda x, g: torch.empty_like(x).random_(5, 9, generator=g),
    "poisson": lambda x, g: torch.poisson(x * 5, generator=g),
    "binomial": lambda x, g: torch.binomial(torch.full_like(x, 9.0), x, generator=g),
    "gamma": lambda x, g: torch._standard_gamma(x, generator=g),
    "dirichlet": lambda x, g: torch._sample_dirichlet(x, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x, dtype=torch.float16, generator=g),
    "randint_like": lambda x, g: torch.randint_like(x, 3, 9, dtype=torch.int32, generator=g),
    "randint_like below a tensor": lambda x, g: aten.randint_like(x, x.sum().int() + 7, dtype=torch.int32, generator=g),
}


def _draw_into_a_part(x: torch.Tensor, generator: Generator) -> torch.Tensor:
    result = x * 2
    result[1:3].exponential_(2.0, generator=generator)
    return result


@pytest.mark.inductor
def test_generators_of_the_user_give_what_they_give_outside(engine):
    own, other = Generator().manual_seed(3), Generator().manual_seed(3)
    x = torch.tensor([0.2, 0.4, 0.6, 0.8])
    model = poptorch.inferenceModel(
        Apply(lambda x: tuple(draw(x, own) for draw in DRAWS.values())), poptorch.Options().engine(engine)
    )
    for _ in range(2):
        for name, found, draw in zip(DRAWS, model(x), DRAWS.values(), strict=True):
            torch.testing.assert_close(found, draw(x, other), msg=name)
