"""Tensors from outside the module are constants, whatever they show of which memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from models import Apply

NUMBERS = torch.randn(6, generator=torch.Generator().manual_seed(0))
COMPLEX = torch.complex(NUMBERS[:4], NUMBERS[2:])
OFFSET = NUMBERS[2:].detach()  # a tensor of its own that starts in the middle of its memory

CONSTANTS = {
    "conjugate": COMPLEX.conj(),
    "conjugate without a base": COMPLEX.conj().detach(),
    "real part": COMPLEX.real,
    "imaginary part": COMPLEX.imag,
    "imaginary part of a conjugate": COMPLEX.conj().imag,
    "complex as real": torch.view_as_real(COMPLEX)[:, 1],
    "real as complex": torch.view_as_complex(torch.stack([NUMBERS, -NUMBERS], 1))[1:5],
    "bits": NUMBERS.view(torch.int32)[:4],
    "inside its memory": OFFSET,
    "view inside the memory of its base": OFFSET.view(2, 2)[:, 0].repeat_interleave(2)[:4].view(2, 2).t()[0].repeat(2),
    "part of a view": OFFSET.view(2, 2)[1].expand(2, 2).reshape(4),
    "strided view of a base with an offset": OFFSET.view(2, 2).t()[1].repeat(2),
    "zeros without memory": torch._efficientzerotensor(4),
}
VIEW_OF_OFFSET = OFFSET.view(2, 2).t()


def run(function, *args, engine: str = "eager"):
    return poptorch.inferenceModel(Apply(function), poptorch.Options().engine(engine))(*args)


@pytest.mark.inductor
def test_constants_of_all_kinds_keep_their_values(engine):
    def add(x):
        return (*(x + constant for constant in CONSTANTS.values()), x.view(2, 2) + VIEW_OF_OFFSET)

    x = torch.randn(4)
    for name, found, expected in zip((*CONSTANTS, "view"), run(add, x, engine=engine), add(x), strict=True):
        assert torch.equal(found, expected), name


def test_what_forward_writes_to_a_constant_shows_in_everything_with_the_same_memory():
    constant = torch.zeros(4)
    detached, part = constant.detach(), constant[1:3].detach()

    def forward(x):
        constant.copy_(x)
        return detached + 0, part + 0

    whole, middle = run(forward, torch.arange(4.0))
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert middle.tolist() == [1.0, 2.0]
    assert not constant.any()


@pytest.mark.parametrize(
    "show", [lambda base: base.view(torch.int32), lambda base: base.as_strided((4,), (1,), 0).detach()]
)
def test_memory_that_was_written_through_another_tensor_is_refused_with_the_line(show):
    memory = torch.ones(4)
    base = memory[:2].detach()
    shown = show(base)

    def forward(x):
        base.copy_(x)
        return shown + 1

    with pytest.raises(poptorch.Error, match=r"changed through another one(?s:.*)return shown \+ 1"):
        run(forward, torch.zeros(2))


def test_parts_of_the_same_memory_may_be_written_one_by_one():
    memory = torch.zeros(4)
    first, second = memory[:2].detach(), memory[2:].detach()

    def forward(x):
        first.add_(x)
        second.sub_(x)
        return torch.cat([first, second])

    assert run(forward, torch.ones(2)).tolist() == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.inductor
def test_as_strided_counts_from_the_start_of_an_argument(engine):
    whole = torch.arange(12.0)

    def corner(x):
        return x.as_strided((2, 2), (2, 1), x.storage_offset() + 1) * 1

    model = poptorch.inferenceModel(Apply(corner), poptorch.Options().engine(engine))
    for start in (4, 0, 2):
        x = whole[start : start + 6]
        assert torch.equal(model(x), corner(x))


@pytest.mark.inductor
def test_views_of_state_that_lies_inside_larger_memory(engine):
    memory = torch.arange(12.0)
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = memory[5:9].view(2, 2)
    row = layer.weight[1]
    model = Apply(lambda x: layer(x) + row)
    model.layer = layer
    expected = model(torch.ones(2)).detach()
    assert torch.equal(poptorch.inferenceModel(model, poptorch.Options().engine(engine))(torch.ones(2)), expected)


def test_sparse_tensors_are_refused_with_the_line():
    matrix = torch.eye(2).to_sparse()
    with pytest.raises(poptorch.Error, match=r"uses a sparse(?s:.*)torch\.sparse\.mm\(matrix"):
        run(lambda x: torch.sparse.mm(matrix, x), torch.ones(2, 2))


def test_quantized_tensors_are_refused_with_the_line():
    with pytest.warns(UserWarning, match="deprecated"):
        matrix = torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8)
    with pytest.raises(poptorch.Error, match=r"uses a quantized(?s:.*)matrix\.dequantize"):
        run(lambda x: x + matrix.dequantize(), torch.ones(2))
