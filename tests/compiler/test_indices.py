"""Every op that takes indices accepts what PyTorch accepts, and refuses the rest with an error of ours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch

X = torch.arange(12.0).view(4, 3)
WEIGHT = torch.arange(12.0).view(4, 3) / 10
SCORES = torch.log_softmax(torch.arange(40.0).view(5, 2, 4).sin(), 2)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def assigned(index: torch.Tensor) -> torch.Tensor:
    result = X.clone()
    result[index] = 5.0
    return result


def scattered_in_place(index: torch.Tensor) -> torch.Tensor:
    return X.clone().masked_scatter_(index.sum() > X, X[0])


# What an op makes of two integers, the name under which it refuses them, and how many there are to choose from.
OPS = {
    "embedding": (lambda i: F.embedding(i, WEIGHT), "embedding", 4),
    "embedding, padded": (lambda i: F.embedding(i, WEIGHT, padding_idx=1), "embedding", 4),
    "embedding, renormalised": (lambda i: F.embedding(i, WEIGHT.clone(), max_norm=1.0), "embedding_renorm", 4),
    "embedding_bag": (lambda i: F.embedding_bag(i.view(1, -1), WEIGHT), "embedding_bag", 4),
    "embedding_bag, bags": (lambda i: F.embedding_bag(i, WEIGHT, integers(0, 1)), "embedding_bag", 4),
    "embedding_bag, starts": (lambda i: F.embedding_bag(integers(0, 1, 2, 3), WEIGHT, i), "embedding_bag", 5),
    "embedding_bag, first": (
        lambda i: F.embedding_bag(integers(0, 1), WEIGHT, torch.stack([i[1] - 1, i[0] + 1])),
        "embedding_bag",
        1,
    ),
    "index": (lambda i: X[i], "index", 4),
    "index, twice": (lambda i: X[i, i], "index", 3),
    "index_select": (lambda i: X.index_select(0, i), "index_select", 4),
    "index_select, last": (lambda i: X.index_select(-1, i), "index_select", 3),
    "gather": (lambda i: X.gather(0, i.view(1, -1)), "gather", 4),
    "take_along_dim": (lambda i: torch.take_along_dim(X, i.view(-1, 1), 0), "gather", 4),
    "scatter": (lambda i: X.scatter(0, i.view(1, -1), X), "scatter", 4),
    "scatter, value": (lambda i: X.scatter(0, i.view(1, -1), 9.0), "scatter", 4),
    "scatter_add": (lambda i: X.scatter_add(0, i.view(1, -1), X), "scatter_add", 4),
    "scatter_reduce": (lambda i: X.scatter_reduce(0, i.view(1, -1), X, "amax"), "scatter_reduce", 4),
    "index_add": (lambda i: X.index_add(0, i, X[:2]), "index_add", 4),
    "index_copy": (lambda i: X.index_copy(0, i, X[:2]), "index_copy", 4),
    "index_fill": (lambda i: X.index_fill(0, i, 9.0), "index_fill", 4),
    "index_fill, tensor": (lambda i: X.index_fill(0, i, torch.tensor(9.0)), "index_fill", 4),
    "index_put": (lambda i: X.index_put((i,), X[:2], accumulate=True), "index_put", 4),
    "assignment": (assigned, "index_put", 4),
    "take": (lambda i: X.take(i), "take", 12),
    "put": (lambda i: X.put(i, X[0, :2]), "put", 12),
    "nll_loss": (lambda i: F.nll_loss(X[:2], i), "nll_loss", 3),
    "nll_loss2d": (lambda i: F.nll_loss(X[:2].view(2, 3, 1, 1), i.view(2, 1, 1)), "nll_loss2d", 3),
    "cross_entropy": (lambda i: F.cross_entropy(X[:2], i, label_smoothing=0.1), "nll_loss", 3),
    "multi_margin_loss": (lambda i: F.multi_margin_loss(X[:2], i), "multi_margin_loss", 3),
    "multi_margin_loss, a number": (lambda i: F.multi_margin_loss(X[0, 0], i[:1] // 2), "multi_margin_loss", 1),
    "multilabel_margin_loss": (
        lambda i: F.multilabel_margin_loss(X[:1], F.pad(i, (0, 1), value=-1).view(1, 3)),
        "multilabel_margin_loss",
        3,
    ),
    "one_hot": (lambda i: F.one_hot(i, 4).float(), "one_hot", 4),
    "max_unpool1d": (lambda i: F.max_unpool1d(X[None, :1, :2], i.view(1, 1, 2), 2), "max_unpool2d", 4),
    "max_unpool2d": (lambda i: F.max_unpool2d(X[:1, :2].view(1, 1, 1, 2), i.view(1, 1, 1, 2), 2), "max_unpool2d", 8),
    "max_unpool3d": (
        lambda i: F.max_unpool3d(X[:1, :2].view(1, 1, 1, 1, 2), i.view(1, 1, 1, 1, 2), 2),
        "max_unpool3d",
        16,
    ),
    "searchsorted": (
        lambda i: torch.searchsorted(torch.tensor([1.0, 3.0]), X[0], sorter=i).float(),
        "searchsorted",
        2,
    ),
    "segment_reduce, lengths": (lambda i: torch.segment_reduce(X[:1], "sum", lengths=i), "segment_reduce", 2),
    "segment_reduce, offsets": (
        lambda i: torch.segment_reduce(X, "sum", offsets=F.pad(i, (0, 1), value=4)),
        "segment_reduce",
        5,
    ),
    "ctc_loss": (lambda i: F.ctc_loss(SCORES, i.view(2, 1), integers(5, 4), integers(1, 1)), "ctc_loss", 4),
    "ctc_loss, joined": (lambda i: F.ctc_loss(SCORES, i, integers(5, 4), integers(1, 1)), "ctc_loss", 4),
    "ctc_loss, inputs": (
        lambda i: F.ctc_loss(SCORES, integers(1, 2).view(2, 1), i, integers(0, 1), reduction="sum", zero_infinity=True),
        "ctc_loss",
        6,
    ),
    "ctc_loss, targets": (
        lambda i: F.ctc_loss(SCORES, integers(1, 2).view(2, 1), integers(5, 4), i, reduction="sum"),
        "ctc_loss",
        2,
    ),
    "masked_scatter": (lambda i: X.masked_scatter(i.sum() > X, X[0]), "masked_scatter", 4),
    "masked_scatter_": (scattered_in_place, "masked_scatter", 4),
    "lu_unpack": (lambda i: torch.lu_unpack(torch.eye(2), (i + 1).int())[0], "lu_unpack", 2),
    "lu_solve": (lambda i: torch.linalg.lu_solve(torch.eye(2), (i + 1).int(), X[:2, :2]), "linalg_lu_solve", 2),
}


# PyTorch reads memory that is not its own for some integers that these do not take.
UNCHECKED = {"segment_reduce, offsets", "ctc_loss", "ctc_loss, joined", "ctc_loss, inputs", "ctc_loss, targets"}


def is_accepted(name: str, index: torch.Tensor) -> bool:
    function, _, size = OPS[name]
    if name in UNCHECKED:
        return bool(((index >= 0) & (index < size)).all())
    try:
        function(index)
    except (RuntimeError, IndexError):
        return False
    return True


class Indexing(nn.Module):
    """All ops at once, each with indices of its own."""

    def __init__(self, names, source: str) -> None:
        super().__init__()
        self.names, self.source = names, source
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("offset", torch.zeros(1, dtype=torch.int64))

    def forward(self, **indices):
        return tuple(OPS[name][0](self.index(indices[f"i{n}"])) for n, name in enumerate(self.names))

    def index(self, index):
        if self.source == "a long computation":
            for _ in range(20):
                index = (index + 1) - 1
        return index + {"weights": self.weight.long(), "buffers": self.offset}.get(self.source, 0)


GOOD = integers(0, 1)


def assert_accepts_what_pytorch_does(names, source: str, more: list[int], engine: str = "eager") -> None:
    """One model with some ops: results for good indices, then bad ones for each op."""
    model = poptorch.inferenceModel(Indexing(names, source), poptorch.Options().engine(engine))
    arguments = {f"i{n}": GOOD for n in range(len(names))}
    for name, value in zip(names, model(**arguments), strict=True):
        torch.testing.assert_close(value, OPS[name][0](GOOD), check_dtype=False, msg=name)
    for n, name in enumerate(names):
        _, refused_by, size = OPS[name]
        for number in (-1, -size - 1, size, *(factor * size for factor in more)):
            index = integers(0, number)
            if is_accepted(name, index):
                model(**{**arguments, f"i{n}": index})
                continue
            with pytest.raises(IndexError, match=rf"but {refused_by} takes(?s:.*)test_indices\.py") as error:
                model(**{**arguments, f"i{n}": index})
            assert isinstance(error.value, poptorch.Error), name


@pytest.mark.parametrize("source", ["arguments", "weights", "a long computation", "buffers"])
def test_every_op_accepts_what_pytorch_accepts(source):
    for name in OPS:
        assert_accepts_what_pytorch_does([name], source, [-1, 2**40, -(2**40)])


NATIVE = [
    "embedding",
    "embedding_bag, starts",
    "index, twice",
    "gather",
    "scatter_add",
    "index_put",
    "take",
    "nll_loss",
    "multilabel_margin_loss",
    "one_hot",
    "max_unpool2d",
    "segment_reduce, offsets",
    "masked_scatter",
    "ctc_loss",
]


@pytest.mark.inductor
def test_native_code_survives_indices_that_depend_on_weights(engine):
    assert_accepts_what_pytorch_does(NATIVE, "weights", [], engine)
