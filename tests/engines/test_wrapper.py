"""The code around kernels: what it includes, how it calls ops that have no C function, and who writes it."""

from __future__ import annotations

import shutil

import pytest
import torch

import poptorch
from poptorch.engines.building import Build
from poptorch.engines.private import device_codegens, init_backend_registration, lowerings
from poptorch.engines.wrapper import our_wrapper

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def sources(monkeypatch):
    """The code around kernels of all modules that are built."""
    found: list[str] = []
    add = Build.add_calls

    def recording(build: Build, calls: str) -> None:
        found.append(calls)
        add(build, calls)

    monkeypatch.setattr(Build, "add_calls", recording)
    return found


def run(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    return poptorch.inferenceModel(model.eval(), poptorch.Options().engine("inductor"))(*inputs)


class Last(torch.nn.Module):
    """An LSTM and a loss, whose backward pass has no C function."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.lstm(x)[0][:, -1].square().sum(), reduction="sum")


def test_the_backward_pass_of_an_lstm_needs_no_dispatcher_headers(sources):
    torch.manual_seed(0)
    model, twin = Last(), Last()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 3)
    options = poptorch.Options().engine("inductor")
    loss = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))(x)
    expected = twin(x)
    expected.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert any("aten::mkldnn_rnn_layer_backward" in source for source in sources)
    assert not any("Dispatcher.h" in source for source in sources)


class Tricky(torch.nn.Module):
    """Ops without a C function: words, sizes, numbers and switches, arguments that are left out, unused results."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, _ = torch.linalg.eigh(x @ x.T)
        near = torch.nn.functional.interpolate(x[None, None], scale_factor=2.0, mode="bicubic", align_corners=False)
        return values, near


_WITHOUT_C_FUNCTION = {"_linalg_eigh", "upsample_bicubic2d"}


def test_ops_without_a_c_function_get_their_arguments(sources, monkeypatch):
    monkeypatch.setenv("CI", "true")  # there Inductor, which remembers what it has called, refuses calls by itself
    monkeypatch.delitem(lowerings, torch.ops.aten.upsample_bicubic2d.default, raising=False)
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(run(Tricky(), x), Tricky()(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    called = {name for name in _WITHOUT_C_FUNCTION if any(f'_call_dispatcher("aten::{name}"' in s for s in sources)}
    assert called == _WITHOUT_C_FUNCTION


class Joined(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.block_diag(x, x) + torch.linalg.multi_dot([x, x, x]).sum()


def test_other_ops_without_a_c_function_still_work():
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(run(Joined(), x), Joined()(x))


def test_inductor_gets_its_own_class_back():
    init_backend_registration()
    theirs = device_codegens["cpu"]
    with our_wrapper():
        assert device_codegens["cpu"] is not theirs
    assert device_codegens["cpu"] is theirs
