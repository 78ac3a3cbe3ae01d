"""The tiered engine: a model starts on the eager engine, and goes on with native code between two calls."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import poptorch
from models import Apply, Scale
from poptorch._logging import warn_once
from poptorch.engines import EagerEngine, toolchain
from poptorch.engines.eager import EagerKernel
from poptorch.model import build, tiers
from poptorch.model.background import Answer, Verdict
from poptorch.runtime import Seat
from poptorch.store import executable_parts

BATCH = torch.ones(4, 3), torch.ones(4, 2)
CHANNELS_LAST = (27, 1, 9, 3)


class Turned:
    """An eager kernel that says, as native code does, in which layout it wants its weights."""

    def __init__(self, kernel: EagerKernel, strides) -> None:
        self._kernel, self.strides = kernel, strides

    def bind(self, state, generators):
        return self._kernel.bind(state, generators)


class Later:
    """Stands for the process in the background: it is ready when a test says so."""

    def __init__(self, executable, programs, cache):
        self.parts = executable_parts(executable)  # raises for what no other process could read
        self.executable, self.programs = executable, programs
        self.answer = None
        self.stops = self.closes = 0
        LATERS.append(self)

    def finish(self, verdict=Verdict.READY, reason="", strides=None):
        programs = [self.executable.program(name) for name in self.programs]
        kernels = EagerEngine().compile(programs)
        self.answer = Answer(verdict, {name: Turned(k, strides or {}) for name, k in kernels.items()}, reason)

    def poll(self):
        return self.answer

    def wait(self, seconds):
        return self.answer

    def stop(self):
        self.stops += 1

    def close(self):
        self.closes += 1


LATERS: list[Later] = []


@pytest.fixture
def later(monkeypatch):
    """The compilations that models have asked for."""
    LATERS.clear()
    monkeypatch.setattr(toolchain, "missing", lambda: None)
    monkeypatch.setattr(tiers, "BackgroundCompilation", Later)
    return LATERS


class Net(nn.Module):
    """A convolution, statistics and random numbers: everything that a change of kernels might disturb."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(16, 2)

    def forward(self, x, target):
        y = self.fc(torch.dropout(self.norm(self.conv(x)).relu().flatten(1), 0.3, True))
        return y, nn.functional.mse_loss(y, target)


def net(engine, replicas=2, cache=None):
    torch.manual_seed(0)
    model = Net()
    options = poptorch.Options().engine(engine).randomSeed(7).replicationFactor(replicas)
    options.runSideBySide(False).outputMode(poptorch.OutputMode.All)
    if cache is not None:
        options.enableExecutableCaching(str(cache))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return poptorch.trainingModel(model, options, optimizer), optimizer


def batches(count=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 3, 4, 4, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)
    ]


def same_state(training, other, **tolerance):
    for name, tensor in other.model.state_dict().items():
        torch.testing.assert_close(training.model.state_dict()[name], tensor, **tolerance)


def test_the_first_call_runs_on_eager_and_the_engine_changes_between_calls(later, caplog):
    training, _ = net("tiered")
    training(*batches()[0])
    assert training.engineInUse == "eager"
    later[0].finish()
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        training(*batches()[1])
    assert training.engineInUse == "inductor"
    assert "runs on the inductor engine from now on" in caplog.text


def test_results_weights_statistics_and_random_numbers_go_on_exactly(later):
    training, optimizer = net("tiered")
    oracle, other = net("eager")
    for number, batch in enumerate(batches()):
        if number == 3:
            later[0].finish()
        for found, wanted in zip(training(*batch), oracle(*batch), strict=True):
            assert torch.equal(found, wanted), f"call {number}"
    assert training.engineInUse == "inductor"
    same_state(training, oracle, rtol=0, atol=0)
    assert training.rng_state == oracle.rng_state
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
        assert mine["step"] == theirs["step"] == 6


def test_weights_and_moments_move_to_the_layout_of_native_code(later):
    training, optimizer = net("tiered")
    oracle, other = net("eager")
    first, second, *_ = batches()
    training(*first), oracle(*first)
    later[0].finish(strides=dict.fromkeys(("conv.weight", "conv.weight:exp_avg"), CHANNELS_LAST))
    assert training.waitForNativeCode()
    weight, expected = training.model.conv.weight, oracle.model.conv.weight
    moment = optimizer.state[weight]["exp_avg"]
    assert weight.stride() == moment.stride() == CHANNELS_LAST
    same_state(training, oracle, rtol=0, atol=0)
    assert torch.equal(moment, other.state[expected]["exp_avg"])
    torch.testing.assert_close(training(*second), oracle(*second))
    same_state(training, oracle)


def test_every_replica_keeps_its_own_statistics(later):
    """Rebinding copies those of the first replica; what follows would show if a change of kernels did so."""
    training, _ = net("tiered")
    training(*batches()[0])
    before = [dict(replica) for replica in training._session._bound.replicas]
    assert not torch.equal(before[0]["norm.running_mean"], before[1]["norm.running_mean"])
    later[0].finish()
    assert training.waitForNativeCode()
    after = training._session._bound.replicas
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine["norm.running_mean"], theirs["norm.running_mean"])


def test_an_inference_model_keeps_its_snapshot(later):
    model = Scale(2.0)
    inference = poptorch.inferenceModel(model, poptorch.Options().engine("tiered"))
    assert inference(torch.ones(1)).item() == 2
    with torch.no_grad():
        model.factor.fill_(5.0)  # on the host: seen after an explicit copy only
    later[0].finish()
    assert inference(torch.ones(1)).item() == 2
    assert inference.engineInUse == "inductor"
    inference.copyWeightsToDevice()
    assert inference(torch.ones(1)).item() == 5


def test_a_failure_in_the_background_is_one_warning_and_the_model_goes_on(later, caplog):
    training, _ = net("tiered")
    training(*batches()[0])
    later[0].finish(Verdict.FAILED, "the compiler said no")
    for batch in batches()[1:3]:
        training(*batch)
    assert training.engineInUse == "eager"
    assert [r.message for r in caplog.records if "the compiler said no" in r.message][1:] == []
    assert "goes on with the eager engine" in caplog.text
    assert not training.waitForNativeCode()


def test_kernels_that_cannot_be_bound_leave_everything_as_it_was(later):
    training, _ = net("tiered")
    oracle, _ = net("eager")
    first, second, *_ = batches()
    training(*first), oracle(*first)
    later[0].finish(strides={"conv.weight": CHANNELS_LAST})
    broken = next(iter(later[0].answer.kernels.values()))
    broken.bind = lambda state, generators: exec("raise MemoryError")
    with pytest.raises(MemoryError):
        training(*second)
    assert training.engineInUse == "eager"
    assert training.model.conv.weight.stride() == oracle.model.conv.weight.stride()
    assert torch.equal(training(*second)[1], oracle(*second)[1])
    same_state(training, oracle, rtol=0, atol=0)


def test_kernels_are_not_exchanged_while_something_has_to_be_taken_back(later):
    """An interrupt while a call takes back what it began leaves that to the next call, on the tensors of then."""
    training, _ = net("tiered")
    oracle, _ = net("eager")
    first, second, third, *_ = batches()
    training(*first), oracle(*first)
    later[0].finish(strides={"conv.weight": CHANNELS_LAST})
    session = training._session
    session._begin()
    assert not session.is_settled
    training(*second), oracle(*second)
    assert training.engineInUse == "eager"
    training(*third), oracle(*third)
    assert training.engineInUse == "inductor"
    same_state(training, oracle)


def test_code_that_cannot_leave_its_process_is_made_here(later, monkeypatch):
    compiled = []

    def compile_here(task, engine, display=None):
        compiled.append(engine.name)
        return EagerEngine().compile(task.programs)

    monkeypatch.setattr(tiers.Task, "compile", compile_here)
    training, _ = net("tiered")
    training(*batches()[0])
    later[0].finish(Verdict.ONLY_HERE, "it calls Python")
    training(*batches()[1])
    assert compiled == ["eager", "inductor"]
    assert training.engineInUse == "inductor"


OWN = torch.Generator()


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + torch.rand(1, generator=OWN),
        lambda x: poptorch.ipu_print_tensor(x) * 2,
        lambda x: torch.bernoulli(x.sigmoid()),
    ],
    ids=["a generator of the user", "prints", "draws that need data"],
)
def test_a_program_that_no_other_process_can_compile_is_compiled_before_the_first_call(later, monkeypatch, forward):
    compiled = []

    def compile_here(task, engine, display=None):
        compiled.append(engine.name)
        return EagerEngine().compile(task.programs)

    monkeypatch.setattr(tiers.Task, "compile", compile_here)
    inference = poptorch.inferenceModel(Apply(forward), poptorch.Options().engine("tiered"))
    inference(torch.ones(1))
    assert compiled == ["inductor"]
    assert not later
    assert inference.engineInUse == "inductor"


def test_processes_that_train_together_do_not_change_engines_one_by_one(later, monkeypatch):
    """Each would round differently from some call of its own on, and their weights drift apart."""
    training, _ = net("tiered")
    training(*batches()[0])
    compiled = []

    def compile_here(task, engine, display=None):
        compiled.append(engine.name)
        return EagerEngine().compile(task.programs)

    monkeypatch.setattr(tiers.Task, "compile", compile_here)
    together = replace(training._programs.blueprint(), seat=Seat(companions=object()))  # pyright: ignore[reportArgumentType]
    made = build._compile(together, training._executable, lambda name, graph: None, display=object())
    assert (compiled, made.engine, made.upgrade) == (["inductor"], "inductor", None)
    assert len(later) == 1


def test_what_only_looks_as_if_it_called_python_is_compiled_in_the_background(later):
    def forward(x):
        return torch.dropout(poptorch.nop(x), 0.5, True) + torch.rand(1)

    poptorch.inferenceModel(Apply(forward), poptorch.Options().engine("tiered"))(torch.ones(4))
    assert len(later) == 1


def test_destroying_a_model_ends_its_compilation(later):
    training, _ = net("tiered")
    training(*batches()[0])
    training.destroy()
    assert later[0].closes == 1


def test_a_detached_model_compiles_nothing_until_it_is_called_again(later):
    training, _ = net("tiered")
    training(*batches()[0])
    training.detachFromDevice()
    assert (later[0].stops, later[0].closes) == (1, 0)
    later[0].finish()
    training(*batches()[1])
    assert training.engineInUse == "inductor"


def test_a_failed_first_call_ends_its_compilation(later):
    checked = poptorch.inferenceModel(Apply(lambda x, i: x[i]), poptorch.Options().engine("tiered"))
    with pytest.raises((poptorch.Error, IndexError)):
        checked(torch.ones(2), torch.tensor([5]))
    assert [each.closes for each in later] == [1] * len(later)


def test_a_model_that_cannot_be_loaded_ends_its_compilation(later, monkeypatch):
    monkeypatch.setattr(build, "Session", lambda *args: exec("raise KeyboardInterrupt"))
    training, _ = net("tiered")
    with pytest.raises(KeyboardInterrupt):
        training(*batches()[0])
    assert later[0].closes == 1


def test_each_shape_has_its_own_compilation(later):
    options = poptorch.Options().engine("tiered").allowShapeChanges(True)
    inference = poptorch.inferenceModel(Scale(3.0), options)
    inference(torch.ones(1)), inference(torch.ones(2))
    later[1].finish()
    assert inference(torch.ones(2)).tolist() == [3, 3]
    assert inference.engineInUse == "inductor"
    inference(torch.ones(1))
    assert inference.engineInUse == "eager"


def test_a_new_optimiser_that_trains_less_ends_the_old_compilation(later):
    training, _ = net("tiered")
    training(*batches()[0])
    for parameter in training.model.conv.parameters():
        parameter.requires_grad_(False)
    training.setOptimizer(torch.optim.Adam(training.model.fc.parameters(), lr=0.01))
    training(*batches()[1])
    assert [each.closes for each in later] == [1, 0]


def test_without_a_compiler_the_tiers_are_one_and_a_warning_says_why(monkeypatch, caplog):
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    warn_once.cache_clear()
    inference = poptorch.inferenceModel(Scale(3.0), poptorch.Options().engine("tiered"))
    assert inference(torch.ones(1)).item() == 3
    assert "C++ compiler" in caplog.text


def test_the_engine_is_shown(later):
    training, _ = net("tiered")
    assert "tiered engine)" in repr(training)
    training(*batches()[0])
    assert "tiered engine, eager now)" in repr(training)
