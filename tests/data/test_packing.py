"""Small batches come out of a message as they went in."""

from __future__ import annotations

import collections
import pickle

import pytest
import torch

import poptorch
from data_sets import Inc
from poptorch.data.packing import LARGEST_NBYTES, Packed, packed

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

Point = collections.namedtuple("Point", "x y")


def received(batch):
    """What comes out at the other end."""
    assert isinstance(packed(batch), Packed)
    return pickle.loads(pickle.dumps(packed(batch)))


def test_any_structure():
    batch = {"point": Point(torch.arange(6).view(2, 3), [torch.tensor(True)]), "name": "a", "none": None}
    again = received(batch)
    assert type(again["point"]) is Point
    assert torch.equal(again["point"].x, batch["point"].x)
    assert again["point"].y == [torch.tensor(True)]
    assert (again["name"], again["none"]) == ("a", None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 0)])
def test_any_tensor(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    again = received(tensor)
    assert (again.dtype, again.shape) == (dtype, shape)
    assert torch.equal(again, tensor)
    again.zero_()  # it is memory of its own, that can be written


def test_one_tensor_twice_is_one_tensor():
    one, other = received([torch.ones(2)] * 2)
    assert one is other


def test_large_batches_stay_as_they_are():
    half = torch.zeros(LARGEST_NBYTES // 2, dtype=torch.uint8)
    assert isinstance(packed([half]), Packed)
    assert isinstance(packed([half, half.clone()]), Packed)
    batch = [half, half.clone(), torch.zeros(1)]
    assert packed(batch) is batch


class Special(Inc):
    """Tensors of which the bytes alone do not say everything."""

    def __getitem__(self, index):
        matrix = torch.arange(6.0).view(2, 3)
        return matrix.T, matrix.clone().requires_grad_(), matrix.to_sparse(), torch.nn.Parameter(matrix)


def test_what_is_special_about_a_tensor_is_kept():
    loader = poptorch.DataLoader(poptorch.Options(), Special(1), batch_size=None, num_workers=1)
    ((turned, learned, sparse, parameter),) = loader
    assert turned.stride() == (1, 3)
    assert learned.requires_grad
    assert sparse.is_sparse
    assert type(parameter) is torch.nn.Parameter


def test_workers_pack():
    loader = poptorch.DataLoader(poptorch.Options(), Inc(2), num_workers=1)
    assert not any(batch.is_shared() for batch in loader)


class Unpicklable(Inc):
    def __getitem__(self, index):
        return lambda: index


def test_what_cannot_be_sent_is_an_error_at_once():
    loader = poptorch.DataLoader(poptorch.Options(), Unpicklable(2), batch_size=None, num_workers=1)
    with pytest.raises((AttributeError, TypeError), match=r"(?s)worker process 0.*[Cc]an't pickle local object"):
        next(iter(loader))
