"""Functions that run around every compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.model.hooks import _AFTER, _BEFORE


@pytest.fixture(autouse=True)
def _no_hook_stays_behind():
    yield
    assert not _BEFORE
    assert not _AFTER


def infer(module: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, poptorch.Options().engine("eager"))


def test_hooks_run_in_order_around_forward_once_per_compilation():
    log: list[str] = []

    class Logged(nn.Module):
        def forward(self, x):
            log.append("forward")
            return x + 1

    handles = [poptorch.registerPreCompileHook(lambda name=name: log.append(name)) for name in ("a", "b", "c")]
    handles.append(poptorch.registerPostCompileHook(lambda: log.append("post")))
    model = infer(Logged())
    model(torch.ones(1))
    model(torch.ones(1))
    for handle in handles:
        handle.remove()
    assert log == ["a", "b", "c", "forward", "post"]


def test_removed_hook_is_not_called():
    called: list[str] = []
    handle = poptorch.registerPreCompileHook(lambda: called.append("first"))
    with poptorch.registerPreCompileHook(lambda: called.append("second")):
        handle.remove()
        infer(nn.ReLU())(torch.ones(1))
    infer(nn.ReLU())(torch.ones(1))
    assert called == ["second"]


def test_hooks_see_the_device():
    seen: list[bool] = []

    def look() -> None:
        seen.append(poptorch.isRunningOnIpu())

    with poptorch.registerPreCompileHook(look), poptorch.registerPostCompileHook(look):
        infer(nn.ReLU())(torch.ones(1))
    assert seen == [True, True]
    assert not poptorch.isRunningOnIpu()


def test_post_hook_runs_also_when_forward_fails():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    called: list[str] = []
    with poptorch.registerPostCompileHook(lambda: called.append("post")), pytest.raises(KeyError, match="mine"):
        infer(Broken())(torch.ones(1))
    assert called == ["post"]
    assert not poptorch.isRunningOnIpu()


def test_after_a_failed_compilation_other_models_compile():
    class Lossless(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    lossless = Lossless(2, 2)
    training = poptorch.trainingModel(lossless, poptorch.Options().engine("eager"))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        training(torch.ones(1, 2))
    assert not training.isCompiled()
    assert infer(nn.ReLU())(torch.ones(1)).item() == 1
    assert type(lossless.weight) is nn.Parameter
    assert lossless(torch.ones(1, 2)).shape == (1, 2)


def test_failing_pre_hook_leaves_the_model_uncompiled_and_compilable():
    def refuse() -> None:
        raise ValueError("not now")

    model = infer(nn.ReLU())
    with poptorch.registerPreCompileHook(refuse), pytest.raises(ValueError, match="not now"):
        model(torch.ones(1))
    assert not model.isCompiled()
    assert model(torch.ones(1)).item() == 1


@pytest.mark.parametrize("register", [poptorch.registerPreCompileHook, poptorch.registerPostCompileHook])
@pytest.mark.parametrize("hook", [2, False])
def test_what_cannot_be_called_is_refused(register, hook):
    with pytest.raises(RuntimeError, match=f"must be callable.*{hook}"):
        register(hook)
