"""What the inductor engine computes instead of an op is what the op computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch.engines.decompositions import decompositions

aten = torch.ops.aten


def channels_last(*shape, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((3, 3), (1, 1), (1, 1), (1, 1)), ((3, 2), (2, 1), (2, 0), (1, 2)), ((1, 1), (2, 2), (0, 0), (1, 1))],
)
def test_gradients_of_wide_convolutions(kernel, stride, padding, dilation, wants_x):
    x, weight = channels_last(2, 64, 7, 6, seed=1), channels_last(65, 64, *kernel, seed=2)
    how = (stride, padding, dilation, False, [0, 0], 1)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *how))
    arguments = (gradient, x, weight, [0], *how, [wants_x, True, False])
    found = decompositions()[aten.convolution_backward.default](*arguments)
    expected = aten.convolution_backward(*arguments)
    assert found[2] is None
    assert (found[0] is not None) == wants_x
    torch.testing.assert_close(found[1], expected[1])
    assert found[1].stride() == weight.stride()
    if wants_x:
        torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize(
    ("shape", "channels_out", "groups", "mask"),
    [
        ((1, 63, 5, 5), 64, 1, [True, True, False]),  # narrow
        ((1, 64, 5, 5), 64, 2, [True, True, False]),  # grouped
        ((1, 64, 5, 5), 64, 1, [True, False, False]),  # frozen
        ((8, 64, 32, 32), 64, 1, [True, True, False]),  # large images
    ],
)
def test_other_convolutions_are_left_to_pytorch(shape, channels_out, groups, mask):
    x, weight = channels_last(*shape, seed=1), channels_last(channels_out, shape[1] // groups, 3, 3, seed=2)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    gradient = x.new_zeros(shape[0], channels_out, *shape[2:])
    arguments = (gradient, x, weight, [0], *how, mask)
    assert decompositions()[aten.convolution_backward.default](*arguments) is NotImplemented


LABELS = [[0, 1, -1], [0, -1, 1], [-1, -1, -1], [2, 1, 0], [1, 1, -1]]


@pytest.mark.parametrize("labels", [*LABELS, LABELS], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_rows_may_have_fewer_labels_than_classes(labels, reduction):
    def loss_and_gradient(x):
        loss = F.multilabel_margin_loss(x, torch.tensor(labels), reduction=reduction)
        return loss, torch.autograd.grad(loss.sum(), x)[0]

    x = torch.tensor([0.3, 0.1, 0.5]).expand(torch.tensor(labels).shape).clone().requires_grad_()
    taken_apart = make_fx(loss_and_gradient, decomposition_table=decompositions())(x)
    torch.testing.assert_close(taken_apart(x), loss_and_gradient(x))
