"""Precompiled headers: built once, never by halves, never somebody else's, and never needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from poptorch.engines import headers
from poptorch.engines.building import in_thread
from poptorch.engines.compilers import CompilerError, Job
from poptorch.engines.headers import IN, OUT, Background, Header, build, find

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
LIMIT = 60


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_MACHINE_DIR", str(tmp_path / "machine"))
    return tmp_path / "machine"


@pytest.fixture
def header(tmp_path):
    """A header whose compiler notes each of its runs, and writes a few bytes."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nfor file; do :; done\necho compiled > "$file"\n')
    compiler.chmod(0o755)
    return Header("test", ("vector",), (str(compiler), "-c", IN, "-o", OUT), "version 1")


def runs(header: Header) -> int:
    noted = Path(header.command[0]).with_name("runs")
    return noted.read_text().count("run") if noted.exists() else 0


def test_a_header_is_built_once(header, folder):
    assert find(header) is None
    assert build(header, Job())
    assert build(header, Job())
    assert runs(header) == 1
    assert find(header) == str(folder / f"{header.key}.h")
    assert not list(folder.glob(".*"))


def test_threads_that_want_the_same_header_build_one(header, folder):
    all_runs = [in_thread(lambda: build(header, Job())) for _ in range(4)]
    for run in all_runs:
        run.result(LIMIT)
    assert runs(header) == 1


@pytest.mark.parametrize("change", [{"facts": "version 2"}, {"includes": ("map",)}, {"command": ("other", IN)}])
def test_another_version_is_another_header(change, header):
    from dataclasses import replace

    assert replace(header, **change).key != header.key


def test_a_header_that_others_could_have_written_is_not_used(header, folder):
    build(header, Job())
    compiled = folder / f"{header.key}.h.gch"
    compiled.chmod(0o666)
    assert find(header) is None
    assert build(header, Job())  # a new one takes its place
    assert find(header) is not None
    assert runs(header) == 2


@pytest.mark.parametrize("name", ["{}.h", "{}.h.gch"])
def test_a_link_is_not_used(name, header, folder, tmp_path):
    build(header, Job())
    path = folder / name.format(header.key)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert find(header) is None


def test_the_header_of_another_user_is_not_used(header, folder, monkeypatch):
    build(header, Job())
    monkeypatch.setattr(headers.os, "geteuid", lambda: os.getuid() + 1)
    assert find(header) is None


def test_a_folder_that_others_can_write_to_is_not_used(header, folder):
    build(header, Job())
    folder.chmod(0o777)
    assert find(header) is None
    with pytest.raises(PermissionError, match="others can write to"):
        build(header, Job())


def test_a_header_of_another_text_is_not_used(header, folder):
    build(header, Job())
    (folder / f"{header.key}.h").write_text("#include <map>\n")
    assert find(header) is None


def test_a_compiler_that_fails_leaves_nothing(header, folder):
    Path(header.command[0]).write_text("#!/bin/sh\necho 'error: bad'; exit 1\n")
    with pytest.raises(CompilerError, match="bad"):
        build(header, Job())
    assert find(header) is None
    assert not list(folder.glob("*.gch"))
    assert not list(folder.glob(".*"))


def test_a_builder_that_is_killed_leaves_no_header_and_lets_the_next_one_build(header, folder, tmp_path):
    program = f"""
        from poptorch.engines.compilers import Job
        from poptorch.engines.headers import Header, build
        build(Header{(header.name, header.includes, header.command, header.facts)}, Job())
    """
    fast = Path(header.command[0]).read_text()
    Path(header.command[0]).write_text(f"#!/bin/sh\necho $$ > {tmp_path}/number\nexec sleep 600\n")
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    end = time.monotonic() + LIMIT
    while not (tmp_path / "number").exists() or not (tmp_path / "number").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not build(header, Job())  # somebody is at it
    process.kill()
    process.wait(LIMIT)
    os.kill(int((tmp_path / "number").read_text()), signal.SIGKILL)  # nobody could do that any more
    assert find(header) is None
    Path(header.command[0]).write_text(fast)
    assert build(header, Job())


def test_what_is_old_is_removed(header, folder):
    folder.mkdir(mode=0o700)
    for name in ("old.h", "old.h.gch", ".abc.part", "new.h.gch"):
        (folder / name).touch()
    for name in ("old.h.gch", ".abc.part"):
        os.utime(folder / name, (0, 0))
    build(header, Job())
    assert {path.name for path in folder.iterdir()} == {
        "new.h.gch",
        *(f"{header.key}.{end}" for end in ("h", "h.gch", "lock")),
    }


@pytest.mark.parametrize(("threads", "is_built"), [("2", False), ("8", True)])
def test_few_threads_are_left_to_the_programs(threads, is_built, header, folder, monkeypatch):
    monkeypatch.setenv("POPTORCH_COMPILE_THREADS", threads)
    background = Background()
    background.begin([header], while_compiling=True)
    background.wait(LIMIT)
    assert (find(header) is not None) is is_built
    background.begin([header], while_compiling=False)
    background.wait(LIMIT)
    assert find(header) is not None
    assert runs(header) == 1


def test_a_machine_without_a_folder_for_headers_has_none(header, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("POPTORCH_MACHINE_DIR", str(tmp_path / "file" / "machine"))
    background = Background()
    background.begin([header], while_compiling=False)
    background.wait(LIMIT)
    assert find(header) is None


@needs_compiler
def test_the_compiler_uses_it_or_does_without(folder, tmp_path):
    command = ("g++", "-std=c++20", "-c", IN, "-o", OUT)
    header = Header("real", ("vector",), command, "")
    (tmp_path / "x.cpp").write_text("std::vector<int> x;\n")
    files = {IN: str(tmp_path / "x.cpp"), OUT: str(tmp_path / "x.o")}

    def compile_with(path: str) -> None:
        Job().run([*(files.get(word, word) for word in command), "-include", path], str(tmp_path))

    assert build(header, Job())
    found = find(header)
    assert found is not None
    compile_with(found)
    (folder / f"{header.key}.h.gch").write_text("damaged")
    compile_with(found)
    (folder / f"{header.key}.h.gch").unlink()
    compile_with(found)
