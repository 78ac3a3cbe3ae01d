"""What is remembered about the results of ops is what PyTorch says, for these arguments and for no others."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch.capture.shapes import Kind, Shapes, kind_of

aten = torch.ops.aten
X = torch.zeros(4, 6)
COUNTS = torch.zeros(4, 6, dtype=torch.int64)


class Called(TorchDispatchMode):
    """The ops that PyTorch is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def layouts(result):
    items = result if isinstance(result, (tuple, list)) else [result]
    return [None if item is None else layout(item) for item in items]


def faked(fake, value):
    if isinstance(value, torch.Tensor):
        return fake.from_tensor(value, static_shapes=True)
    return [faked(fake, item) for item in value] if isinstance(value, list) else value


LIKE_ONE_ANOTHER = {
    "other strides": (aten.clone.default, [(X,), (X.t(),), (torch.zeros(6, 4).t(),)]),
    "other shapes": (aten.mul.Tensor, [(X, X), (X, X[:1]), (X[0], X)]),
    "types of constants": (aten.add.Scalar, [(COUNTS, 1), (COUNTS, 1.0), (COUNTS, True)]),
    "types of tensors": (aten.sum.default, [(X,), (X.half(),), (COUNTS,), (X > 0,)]),
    "expanded tensors": (aten.clone.default, [(X[:1].contiguous(),), (X[:1].expand(4, 6),), (X[:, :1].expand(4, 6),)]),
    "overlapping tensors": (aten.neg.default, [(X.as_strided((3, 4), (4, 1)),), (X.as_strided((3, 4), (1, 1)),)]),
    "empty tensors": (aten.mm.default, [(X, X.t()), (X[:0], X.t()), (X[:, :0], X.t()[:0])]),
    "lists": (aten.sum.dim_IntList, [(X, [0]), (X, [1]), (X, [0, 1]), (X, [0], True)]),
    "parts of memory": (aten.select.int, [(X, 0, 0), (X, 0, 1), (X, 1, 1), (X[1:], 0, 1)]),
    "views": (aten.view.default, [(X, [24]), (X, [6, 4]), (X.half(), [6, 4])]),
    "several results": (aten.topk.default, [(X, 2), (X, 1), (X, 2, 0)]),
    "lists of tensors": (aten.cat.default, [([X, X],), ([X, X], 1), ([X, X, X],), ([X, X.half()],)]),
}


@pytest.mark.parametrize("name", LIKE_ONE_ANOTHER)
def test_results_are_those_of_pytorch_for_arguments_that_are_almost_alike(name):
    op, calls = LIKE_ONE_ANOTHER[name]
    with FakeTensorMode() as fake:
        shapes = Shapes(fake)
        for _ in range(2):
            for args in calls:
                expected = op(*(faked(fake, arg) for arg in args))
                found = shapes.compute(op, tuple(faked(fake, arg) for arg in args), {})
                assert layouts(found) == layouts(expected), args
                assert type(found) is type(expected)
        with Called() as called:
            for args in calls:
                shapes.compute(op, tuple(faked(fake, arg) for arg in args), {})
        assert op not in called.ops


def test_named_arguments_count():
    with FakeTensorMode() as fake:
        shapes, x = Shapes(fake), faked(fake, X)
        for _ in range(2):
            assert shapes.compute(aten._to_copy.default, (x,), {"dtype": torch.float16}).dtype is torch.float16
            assert shapes.compute(aten._to_copy.default, (x,), {"dtype": torch.int32}).dtype is torch.int32
            kept = shapes.compute(aten.sum.dim_IntList, (x, [0]), {"keepdim": True})
            assert kept.shape == (1, 6)


def test_the_default_type_counts():
    with FakeTensorMode() as fake:
        shapes, counts = Shapes(fake), faked(fake, COUNTS)
        assert shapes.compute(aten.div.Tensor, (counts, counts), {}).dtype is torch.float32
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert shapes.compute(aten.div.Tensor, (counts, counts), {}).dtype is torch.float64
        finally:
            torch.set_default_dtype(before)


def test_new_results_have_memory_of_their_own_and_views_that_of_their_operand():
    with FakeTensorMode() as fake:
        shapes = Shapes(fake)
        for op, args in ((aten.neg.default, ()), (aten.t.default, ()), (aten._unsafe_view.default, ([24],))):
            for _ in range(3):
                x = faked(fake, X)
                result = shapes.compute(op, (x, *args), {})
                shares = result.untyped_storage()._cdata == x.untyped_storage()._cdata
                assert shares == (op is not aten.neg.default)


def test_conjugated_and_negated_tensors_are_of_other_kinds():
    z = torch.zeros(3, 2, dtype=torch.complex64)
    with FakeTensorMode() as fake:
        shapes, z = Shapes(fake), faked(fake, z)
        keys = [shapes.key(aten.clone.default, (each,), {}) for each in (z, z.conj(), z.imag, z.conj().imag)]
    assert None not in keys
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    "op",
    [
        aten.add_.Tensor,
        aten.add.out,
        aten.bernoulli.p,
        aten.nonzero.default,
        aten._local_scalar_dense.default,
        aten.split.Tensor,
        aten.t_.default,
        aten.lift_fresh.default,
        aten.native_dropout.default,
        torch.ops.poptorch.hint.default,
    ],
    ids=str,
)
def test_ops_that_do_more_than_compute_are_not_remembered(op):
    assert kind_of(op) is Kind.OTHER


def test_values_are_not_looked_away_from():
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shapes, x = Shapes(fake), faked(fake, X)
        assert shapes.key(aten.add.Tensor, (x, x), {}) is not None
        assert shapes.key(aten.add.Tensor, (x, X), {}) is None  # a tensor with values
        constant = torch.tensor(2.0)
        assert constant.constant is not None
        assert shapes.key(aten.mul.Tensor, (x, constant), {}) is None  # one whose value PyTorch goes on knowing
        with torch.inference_mode():
            assert shapes.key(aten.add.Tensor, (x, x), {}) is None
    with FakeTensorMode() as other:
        assert shapes.key(aten.neg.default, (faked(other, X),), {}) is None


def test_tensors_of_the_meta_device_stay_on_it():
    shapes, x = Shapes(FakeTensorMode()), torch.zeros(2, 3, device="meta")
    for _ in range(2):
        result = shapes.compute(aten.sqrt.default, (x,), {})
        assert type(result) is torch.Tensor
        assert result.is_meta
