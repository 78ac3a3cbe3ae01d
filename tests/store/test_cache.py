"""The cache: what was compiled once is loaded by whoever made it; whatever is wrong with it costs a warning."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import poptorch
from models import Regression
from mutations import damaged
from poptorch.engines import EagerEngine
from poptorch.engines.choose import NativeEngine
from poptorch.errors import FileError
from poptorch.store import cache as caching
from poptorch.store import read_container, trust
from poptorch.store.cache import SUFFIX, Cache, Wanted, compile_cached
from poptorch.store.files import programs_digest, why_not_usable

BATCH = torch.ones(4, 3), torch.ones(4, 2)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
pytestmark = needs_compiler


def training_model(folder) -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    model = Regression()
    options = poptorch.Options().engine("inductor").enableExecutableCaching(folder)
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))


def losses(training, count: int = 3) -> list[float]:
    return [training(*BATCH)[1].item() for _ in range(count)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with one program in it, the losses that it gives, its executable and its kernels."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POPTORCH_CACHE", "1")
        training = training_model(folder)
        found = losses(training)
    return folder, found, training._executable, training._session.kernels


class Counting:
    """An engine that does not compile, but counts how often it is asked to."""

    name = "inductor"

    def __init__(self, kernels=None):
        self.calls, self._kernels = 0, kernels

    def compile(self, programs, observe=None):
        self.calls += 1
        return dict(self._kernels) if self._kernels is not None else EagerEngine().compile(programs)


@pytest.fixture
def counting(monkeypatch):
    """Instead of Inductor: nothing here waits for a compiler again."""
    engine = Counting()
    monkeypatch.setattr(NativeEngine, "compile", lambda self, programs, observe: engine.compile(programs))
    monkeypatch.setenv("POPTORCH_CACHE", "1")
    caching.warn_once.cache_clear()
    return engine


@pytest.fixture
def folder(filled, tmp_path):
    """A copy of the filled cache."""
    shutil.copytree(filled[0], tmp_path / "cache")
    return tmp_path / "cache"


def entry(folder: Path) -> Path:
    (found,) = folder.glob(f"*{SUFFIX}")
    return found


def test_what_is_there_is_not_compiled_again_and_gives_the_same(filled, folder, counting):
    assert losses(training_model(folder)) == filled[1]
    assert counting.calls == 0


def test_a_new_process_does_not_import_the_code_generator(filled, folder, programs):
    code = f"""
import os, sys, torch
os.environ["POPTORCH_CACHE"] = "1"
torch.set_num_threads(1)
from models import Regression
torch.manual_seed(0)
model = Regression()
options = poptorch.Options().engine("inductor").enableExecutableCaching({str(folder)!r})
training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
print([training(torch.ones(4, 3), torch.ones(4, 2))[1].item() for _ in range(3)])
print([name for name in ("torch._inductor.codecache", "torch._inductor.compile_fx") if name in sys.modules])
"""
    assert programs.run(code).output == f"{filled[1]}\n[]\n"


def test_a_saved_file_holds_the_native_code_too(filled, folder, counting, tmp_path, monkeypatch):
    training = training_model(folder)
    losses(training, 1)
    training.save(tmp_path / "m.poptorch")
    monkeypatch.setenv("POPTORCH_CACHE", "0")
    assert losses(poptorch.load(tmp_path / "m.poptorch"), 2) == filled[1][1:]
    assert counting.calls == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
    assert losses(poptorch.load(tmp_path / "m.poptorch"), 2) == pytest.approx(filled[1][1:])
    assert counting.calls == 1
    assert losses(poptorch.load(tmp_path / "m.poptorch", trust_code=True), 2) == filled[1][1:]
    assert counting.calls == 1, "the user's word is enough"


def test_trusted_code_must_still_be_that_of_the_file(filled, folder, counting, tmp_path, monkeypatch):
    """Trust is about who made the code, not about whether it belongs to the program and arrived in one piece."""
    training = training_model(folder)
    losses(training, 1)
    training.save(tmp_path / "m.poptorch")
    container = read_container(tmp_path / "m.poptorch")
    made_from = programs_digest(filled[2])
    assert why_not_usable(container, made_from, trusted=True) == ""
    assert "another program" in why_not_usable(container, "0" * 64, trusted=True)
    name = next(name for name in container.parts if name.endswith(".so"))
    changed = replace(container, parts={**container.parts, name: b"other code"})
    assert "not the code that was signed" in why_not_usable(changed, made_from, trusted=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"of another program"),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_damaged_entry_is_one_warning_and_a_compile(spoil, filled, folder, counting, caplog):
    spoil(entry(folder))
    with caplog.at_level("WARNING", "poptorch::python"):
        assert losses(training_model(folder)) == pytest.approx(filled[1])
    assert counting.calls == 1
    about = [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]
    assert len(set(about)) == 1
    assert str(folder) in about[0]


def test_code_of_somebody_else_is_compiled_again_and_replaced(filled, folder, counting, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    counting._kernels = filled[3]
    for _ in range(2):
        assert losses(training_model(folder)) == filled[1]
    assert counting.calls == 1
    assert caplog.text.count("not made by this user on this machine") == 1


def test_no_damage_to_an_entry_gets_past_the_cache(filled, folder, request):
    _, _, executable, _ = filled
    cache, path = Cache(folder), entry(folder)
    engine = Counting()
    count = 10_000 if request.config.getoption("--long") else 100
    for number, content in enumerate(damaged(path.read_bytes(), count), start=1):
        path.write_bytes(content)
        kernels = compile_cached(cache, engine, executable, executable.programs, lambda name, graph: None)
        assert engine.calls == number
        assert kernels.keys() == {program.name for program in executable.programs}


def test_a_signed_entry_of_another_program_is_not_used(filled, folder):
    _, _, executable, _ = filled
    cache, path = Cache(folder), entry(folder)
    wanted = Wanted.of(executable, "inductor")
    other = Wanted({**wanted.facts, "program": "another"}, "")
    shutil.copy(path, cache.path(other.key))
    assert cache.find(wanted) is not None
    with pytest.raises(FileError, match="made from another program"):
        cache.find(other)


@pytest.mark.parametrize("number", [28, 5, 30])  # no space, input/output error, read-only
def test_a_disk_that_fails_costs_a_warning(number, filled, tmp_path, counting, monkeypatch, caplog):
    counting._kernels = filled[3]
    real = os.open

    def fail(path, flags, *more, **named):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", fail)
    assert losses(training_model(tmp_path / "cache")) == filled[1]
    assert counting.calls == 1
    assert os.strerror(number) in caplog.text


def test_a_file_in_place_of_the_folder_and_no_home_cost_a_warning(filled, tmp_path, counting, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    assert losses(training_model(tmp_path / "file")) == pytest.approx(filled[1])

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: (_ for _ in ()).throw(KeyError(number)))
    monkeypatch.chdir(tmp_path)
    counting._kernels = filled[3]
    assert losses(training_model("")) == pytest.approx(filled[1])
    assert "no home directory" in caplog.text
    assert trust.sign(b"code") is None
    assert os.listdir(tmp_path) == ["file"]


def test_it_can_be_switched_off(folder, counting, monkeypatch):
    losses(training_model(None))
    monkeypatch.setenv("POPTORCH_CACHE", "0")
    losses(training_model(folder))
    assert counting.calls == 2


def test_what_was_used_least_recently_goes_first(tmp_path):
    cache = Cache(tmp_path)
    for number in range(4):
        path = cache.path(f"{number}")
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    os.utime(cache.path("0"))
    assert cache.make_room(250, besides=cache.path("1")) == [cache.path("2"), cache.path("3")]
    assert cache.make_room(250) == []


def test_other_surroundings_have_another_key(filled, monkeypatch):
    before = Wanted.of(filled[2], "inductor")
    torch.set_num_threads(2)
    try:
        other = Wanted.of(filled[2], "inductor")
    finally:
        torch.set_num_threads(1)
    assert before.key == Wanted.of(filled[2], "inductor").key != other.key
    monkeypatch.setenv("TORCHINDUCTOR_SOMETHING", "1")
    assert Wanted.of(filled[2], "inductor").key != before.key


# Processes that share a cache. Their engine takes the kernels from a cache that is filled, slowly, and says so.
SHARING = """
import os, time, poptorch, torch
from pathlib import Path
from poptorch.store import cache as caching
from poptorch.store.container import read_container
from poptorch.store.files import read_executable
torch.set_num_threads(1)
executable = read_executable(read_container(Path({model!r})))
wanted = caching.Wanted.of(executable, "inductor")
kernels = caching.Cache(Path({filled!r})).find(wanted)
class Slow:
    name = "inductor"
    def compile(self, programs, observe):
        with open({log!r}, "a") as log:
            log.write("compiled\\n")
        time.sleep({seconds})
        return kernels
poptorch.setLogLevel("DEBUG")
found = caching.compile_cached(caching.Cache(Path({shared!r})), Slow(), executable, executable.programs, None)
print(sorted(found))
"""


@pytest.fixture
def sharing(filled, tmp_path, counting):
    """The code of a process that wants the program from an empty cache."""
    training = training_model(filled[0])
    training.compileAndExport(tmp_path / "m", *BATCH)
    names = {"model": tmp_path / "m", "filled": filled[0], "log": tmp_path / "log", "shared": tmp_path / "shared"}

    def code(seconds: float) -> str:
        return SHARING.format(**{name: str(path) for name, path in names.items()}, seconds=seconds)

    return code


def test_processes_that_want_the_same_compile_once(sharing, tmp_path, programs, request):
    rounds, count = (50, 32) if request.config.getoption("--long") else (1, 4)
    for _ in range(rounds):
        shutil.rmtree(tmp_path / "shared", ignore_errors=True)
        (tmp_path / "log").write_text("")
        running = [programs.start(sharing(0.5)) for _ in range(count)]
        assert [program.wait() for program in running] == [0] * count, running[0].errors
        assert (tmp_path / "log").read_text() == "compiled\n"
        assert all(program.output == "['step']\n" for program in running)
        for program in running:  # one that came too late to wait needs no lock
            assert program.errors.count("cache file locked") == program.errors.count("released the cache lock") <= 1
        assert any("cache file locked" in program.errors for program in running)


def test_a_process_that_is_killed_lets_the_next_one_compile(sharing, tmp_path, programs):
    killed = programs.start(sharing(60))
    killed.wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text(), "a compilation")
    waiting = programs.start(sharing(0))
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert waiting.wait() == 0, waiting.errors
    assert (tmp_path / "log").read_text() == "compiled\n" * 2
    assert waiting.output == "['step']\n"


def test_what_was_not_found_is_remembered_and_only_the_last_ones(filled, tmp_path):
    cache, wanted = Cache(tmp_path), Wanted.of(filled[2], "inductor")
    for _ in range(30):
        cache.note_miss(wanted)
    misses = cache.misses()
    assert len(misses) == 20
    assert misses[-1]["facts"] == wanted.facts
    (tmp_path / "misses.json").write_text("[{}, 5]")
    assert cache.misses() == []


def test_the_key_of_a_cached_program_is_where_the_manifest_says(filled):
    about = Cache(filled[0]).about(entry(filled[0]))
    assert Wanted(about["facts"], "").key + SUFFIX == entry(filled[0]).name
    assert trust.key_file().exists()
