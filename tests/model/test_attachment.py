"""Models take and give back the emulated IPUs."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import textwrap
import time

import pytest
import torch
from torch import nn

import poptorch
from poptorch.enums import ConnectionType
from poptorch.ipu import devices

X = torch.ones(2, 4)


def model(options: poptorch.Options | None = None) -> poptorch.PoplarExecutor:
    options = poptorch.Options() if options is None else options
    return poptorch.inferenceModel(nn.Linear(4, 1), options.engine("eager"))


@pytest.fixture
def ipus(monkeypatch, tmp_path):
    """A machine with so many IPUs that nobody else uses."""
    monkeypatch.setenv("POPTORCH_IPU_LOCKS", str(tmp_path))

    def have(count: int) -> None:
        monkeypatch.setenv("POPTORCH_NUM_IPUS", str(count))

    have(2)
    return have


def test_models_take_different_ipus(ipus):
    first, second = model(), model()
    first(X), second(X)
    assert first._programs.attachment._device.ipus == (0,)
    assert second._programs.attachment._device.ipus == (1,)


def test_too_few_ipus_name_the_way_out(ipus):
    first, second, third = model(), model(), model()
    first(X), second(X)
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 1 IPU\(s\).*\n.*detachFromDevice"):
        third(X)
    assert not third.isCompiled()
    first.detachFromDevice()
    third(X)


def test_more_ipus_than_there_are(ipus):
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 4 IPU\(s\): this machine has 2"):
        model(poptorch.Options().replicationFactor(4))(torch.ones(4, 4))


def test_machine_without_ipus(ipus):
    ipus(0)
    with pytest.raises(poptorch.Error, match="this machine has no emulated IPUs"):
        model()(X)
    model(poptorch.Options().useIpuModel(True))(X)


class Through(nn.Module):
    """Returns its input, and constants made in three ways."""

    def __init__(self):
        super().__init__()
        self.register_buffer("held", torch.ones(3))

    def forward(self, x):
        return x, x.T, self.held, torch.tensor([1.0, 2.0]), torch.zeros(2)


class Draws(nn.Module):
    """Returns what depends on no input, but is no constant."""

    def forward(self, x):
        return x, torch.rand(2)


def test_model_that_computes_nothing_takes_no_ipu(ipus):
    ipus(0)
    executor = poptorch.inferenceModel(Through())
    for given, returned in zip(Through()(X), executor(X), strict=True):
        assert torch.equal(given, returned)
    assert executor.isAttachedToDevice()
    executor.detachFromDevice()
    executor(X)
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 1 IPU\(s\)"):
        poptorch.inferenceModel(Draws())(X)


class Halves(nn.Module):
    """One layer on each of two IPUs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for ipu, layer in enumerate(self.layers):
            poptorch.Block.start(ipu_id=ipu)
            x = layer(x)
        return x


def test_program_from_a_file_takes_the_ipus_of_all_its_blocks(ipus, tmp_path):
    options = poptorch.Options().deviceIterations(2).engine("eager")
    first = poptorch.inferenceModel(Halves(), options)
    first.compileAndExport(tmp_path / "m.poptorch", X)
    assert first._programs.attachment._device.ipus == (0, 1)
    first.destroy()
    assert poptorch.load(str(tmp_path / "m.poptorch"))._programs.attachment._device.ipus == (0, 1)


def test_ipus_are_taken_before_native_code_is_made(ipus, monkeypatch):
    ipus(1)
    made = []
    monkeypatch.setattr("poptorch.model.build._compile", lambda *args: made.append(args))
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 2 IPU\(s\)"):
        poptorch.inferenceModel(Halves(), poptorch.Options().deviceIterations(2))(X)
    assert not made


@pytest.mark.parametrize("end", ["destroy", "detachFromDevice"])
def test_ipus_come_back(ipus, end):
    ipus(1)
    for _ in range(3):
        executor = model()
        executor(X)
        getattr(executor, end)()


def test_forgotten_models_give_their_ipus_back(ipus):
    ipus(1)
    for _ in range(3):
        model()(X)


def test_failed_compilation_gives_the_ipu_back(ipus):
    ipus(1)
    with pytest.raises(RuntimeError):
        model()(torch.ones(2, 5))
    model()(X)


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_a_copy_would_hold_the_same_ipus(ipus, make):
    model = poptorch.inferenceModel(nn.Linear(2, 2))
    make(model)
    model(torch.ones(1, 2))
    with pytest.raises(poptorch.Error, match="cannot be copied or pickled") as raised:
        make(model)
    assert "wrap the copy" in str(raised.value)


def test_chosen_ipu_is_used_by_one_model_at_a_time(ipus):
    first, second = model(poptorch.Options().useIpuId(1)), model(poptorch.Options().useIpuId(1))
    first(X)
    assert first._programs.attachment._device.ipus == (1,)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 1"):
        second(X)
    first.detachFromDevice()
    second(X)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 7"):
        model(poptorch.Options().useIpuId(7))(X)


def test_detached_model_attaches_itself(ipus):
    executor = model()
    executor(X)
    executor.detachFromDevice()
    assert not executor.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.detachFromDevice()
    executor(X)
    assert executor.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="already attached"):
        executor.attachToDevice()


@pytest.mark.parametrize(
    "offline", [lambda o: o.useOfflineIpuTarget(), lambda o: o.connectionType(ConnectionType.Never)]
)
def test_offline_models_compile_but_do_not_run(ipus, offline):
    ipus(0)
    executor = model(offline(poptorch.Options()))
    executor.compile(X)
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        executor(X)
    with pytest.raises(AssertionError, match="offline"):
        executor.attachToDevice()


def test_ipu_model_cannot_be_offline():
    with pytest.raises(poptorch.Error, match="cannot be an offline target"):
        model(poptorch.Options().useIpuModel(True).useOfflineIpuTarget()).compile(X)


def test_on_demand_models_attach_after_compiling(ipus):
    ipus(1)
    holder = model()
    holder(X)
    waiting = model(poptorch.Options().connectionType(ConnectionType.OnDemand))
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        waiting(X)
    holder.detachFromDevice()
    waiting(X)


def test_replicas_must_fit():
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(128\)"):
        model(poptorch.Options().replicationFactor(128))(torch.ones(128, 4))


def test_powers_of_two_where_hardware_is_asked_for(ipus):
    ipus(4)
    rows = torch.ones(3, 4)
    with pytest.raises(poptorch.Error, match=r"3 IPUs(.|\n)*reserves 4"):
        model(poptorch.Options().replicationFactor(3).useIpuModel(False))(rows)
    rounded = model(poptorch.Options().replicationFactor(3).useIpuModel(False).autoRoundNumIPUs(True))
    rounded(rows)
    assert rounded._programs.attachment._device.ipus == (0, 1, 2, 3)


def test_waiting_for_an_ipu_of_this_process(ipus, monkeypatch, caplog):
    ipus(1)
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    holder, waiting = model(), model()
    holder(X)
    monkeypatch.setattr(devices.time, "sleep", lambda seconds: holder.detachFromDevice())
    waiting(X)
    assert "No IPU available, sleeping" in caplog.text


def test_waiting_has_a_limit(ipus, monkeypatch):
    ipus(1)
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    monkeypatch.setenv("POPTORCH_WAIT_LIMIT", "1")
    holder = model()
    holder(X)
    with pytest.raises(poptorch.Error, match="within 1 s"):
        model()(X)


def test_processes_share_the_ipus_and_a_killed_one_gives_them_back(ipus, programs):
    ipus(1)
    variables = {name: value for name, value in os.environ.items() if name.startswith("POPTORCH_")}
    code = f"""
        import os, time, torch
        os.environ.update({variables})
        model = poptorch.inferenceModel(torch.nn.Linear(4, 1), poptorch.Options().engine("eager"))
        model(torch.ones(2, 4))
        print("attached", flush=True)
        time.sleep(60)
    """
    program = programs.start(textwrap.dedent(code))
    program.wait_for(lambda: program.output == "attached\n", "the first call")
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        model()(X)
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    model()(X)


def test_forked_child_does_not_release_the_ipus_of_its_parent(ipus):
    ipus(1)
    executor = model()
    executor(X)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    child.start()
    child.join(30)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        model()(X)
