"""Models that cannot be compiled are refused with an error that says why; they never give wrong numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class BuffersThatShareMemory(nn.Module):
    """One buffer is a view of another, and forward writes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:3])

    def forward(self, x, y):
        self.part.add_(0.1)
        return F.mse_loss(self.fc(x + self.whole[1:]), y)


class PackedSequence(nn.Module):
    """The lengths are a list of Python numbers; the sequence runs packed."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 2, batch_first=True)

    def forward(self, x, y):
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1).expand(-1, 3, -1), [3, 3, 2, 1], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.mse_loss(out.sum(1), y)


class SparseParameter(nn.Module):
    """PyTorch's tracing of such a model ends the process, so it must not begin."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse_csr())

    def forward(self, x, y):
        return F.mse_loss(torch.sparse.mm(self.weight, x.T).T[:, :2], y)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (BuffersThatShareMemory, "part shares memory with whole"),
        (PackedSequence, "packing sequences"),
        (SparseParameter, "parameter weight is a torch.sparse_csr tensor"),
    ],
)
def test_refused_with_the_reason(kind: type[nn.Module], why: str, engine: str) -> None:
    module = kind()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    training = poptorch.trainingModel(module, poptorch.Options().engine(engine))
    with pytest.raises(poptorch.Error, match=why):
        training(torch.ones(4, 3), torch.ones(4, 2))
    after = module.state_dict()
    assert all(torch.equal(after[name].to_dense(), tensor.to_dense()) for name, tensor in before.items())
    training.destroy()
    with torch.no_grad():
        assert module(torch.ones(4, 3), torch.ones(4, 2)).dim() == 0, "the module still works by itself"
