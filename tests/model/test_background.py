"""Compiling in another process: what it makes is used, and it ends when nobody needs it."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
import torch

import poptorch
from model.test_tiers import batches, net, same_state
from models import Regression
from poptorch.model import background
from processes import members

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
LIMIT = 100.0  # seconds, on a machine that is busy with other tests


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where compilations put their files."""
    monkeypatch.setattr(background.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_native_code_from_the_background_goes_on_where_eager_stopped_and_is_kept(tmp_path, monkeypatch, folder):
    """One compilation for all that needs real code: the oracle, and what it leaves in the cache."""
    monkeypatch.setenv("POPTORCH_CACHE", "1")
    training, _ = net("tiered", replicas=1, cache=tmp_path / "cache")
    oracle, _ = net("eager", replicas=1)
    first, second, *others = batches()
    for batch in (first, second):
        assert torch.equal(training(*batch)[1], oracle(*batch)[1])
    assert training.engineInUse == "eager"
    pid = training._current.upgrade._compilation._place.process.pid
    assert training.waitForNativeCode(LIMIT)
    same_state(training, oracle, rtol=0, atol=0)
    for batch in others:
        torch.testing.assert_close(training(*batch), oracle(*batch), rtol=1e-4, atol=1e-5)
    same_state(training, oracle, rtol=1e-4, atol=1e-5)
    assert training.rng_state == oracle.rng_state
    assert len(members(group=pid)) == 0
    assert [path.name for path in folder.glob("poptorch-compile-*")] == []

    again, _ = net("tiered", replicas=1, cache=tmp_path / "cache")
    again(*first)
    assert again.engineInUse == "inductor"
    again.save(tmp_path / "model.poptorch")
    assert poptorch.load(tmp_path / "model.poptorch").engineInUse == "inductor"


@pytest.mark.only_long
def test_a_compiler_that_does_not_work_is_one_warning(monkeypatch, caplog, folder):
    monkeypatch.setenv("CXX", "false")
    training, _ = net("tiered")
    first, second, *_ = batches()
    training(*first)
    assert not training.waitForNativeCode(LIMIT)
    training(*second)
    assert training.engineInUse == "eager"
    warnings = [record.message for record in caplog.records if "native code" in record.message]
    assert len(warnings) == 1
    assert "the C++ compiler false is broken" in warnings[0]
    assert list(folder.iterdir()) == []


def begun(training) -> int:
    """The number of the process that compiles for a model."""
    training(*BATCH)
    return training._current.upgrade._compilation._place.process.pid


BATCH = torch.ones(4, 3), torch.ones(4, 2)


def regression() -> poptorch.PoplarExecutor:
    model = Regression()
    options = poptorch.Options().engine("tiered")
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))


def test_destroy_ends_the_process_and_removes_its_files(folder):
    training = regression()
    pid = begun(training)
    assert len(list(folder.iterdir())) == 1
    training.destroy()
    assert members(group=pid) == {}
    assert list(folder.iterdir()) == []


def test_a_detached_model_begins_again_when_it_is_called(folder):
    training = regression()
    pid = begun(training)
    training.detachFromDevice()
    assert members(group=pid) == {}
    again = begun(training)
    assert again != pid
    assert members(group=again)
    training.destroy()


def test_only_some_models_compile_at_once(monkeypatch, folder):
    monkeypatch.setattr(background, "_most_at_once", lambda: 1)
    first, second = regression(), regression()
    pid = begun(first)
    second(*BATCH)
    waiting = second._current.upgrade._compilation._place
    assert waiting.process is None
    first.destroy()
    second(*BATCH)
    assert waiting.process is not None
    assert waiting.process.pid != pid
    second.destroy()


def test_a_killed_compilation_is_a_failure(caplog, folder):
    training = regression()
    os.killpg(begun(training), signal.SIGKILL)
    assert not training.waitForNativeCode(LIMIT)
    assert "signal 9 ended the process that compiles, perhaps for lack of memory" in caplog.text


def test_a_fork_leaves_the_compilation_alone(folder):
    training = regression()
    pid = begun(training)
    child = os.fork()
    if child == 0:
        training(*BATCH)
        training.destroy()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert members(group=pid)
    assert len(list(folder.iterdir())) == 1
    training.destroy()


PROGRAM = """
    import os, sys, torch, poptorch
    import tempfile; tempfile.tempdir = {folder!r}
    sys.path.insert(0, {tests!r})
    from model.test_background import BATCH, begun, regression
    training = regression()
    print(begun(training), flush=True)
    {then}
"""
ENDS = {
    "": 0,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_with_the_program_however_that_ends(programs, tmp_path, end):
    tests = str(Path(__file__).parent.parent)
    code = PROGRAM.format(folder=str(tmp_path), tests=tests, then=f"import signal; {end}")
    program = programs.start(textwrap.dedent(code))
    assert program.wait() == ENDS[end]
    pid = int(program.output)
    program.wait_for(lambda: not members(group=pid), "the end of the process that compiles", 60)
    assert list(tmp_path.glob("poptorch-compile-*")) == []


LOADING = """
    import torch, poptorch
    from torch.utils.data import TensorDataset
    options = poptorch.Options().engine("tiered")
    data = TensorDataset(torch.ones(64, 3), torch.ones(64, 2))
    from models import Regression
    model = Regression()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(4, 3), torch.ones(4, 2))
    count = 0
    for _ in range(3):
        loader = poptorch.DataLoader(options, data, batch_size=4, num_workers=2)
        for batch in loader:
            training(*batch)
            count += 1
    assert training.engineInUse == "eager"
    print(count)
"""


def test_workers_can_be_forked_meanwhile(programs):
    assert programs.run(textwrap.dedent(LOADING)).output.split() == ["48"]
