"""The command `poptorch` says what is there, what was not found and why, and what to mend."""

from __future__ import annotations

import os
import re

import pytest
from click.testing import CliRunner

import poptorch
from poptorch.cli import machine, main
from poptorch.engines.toolchain import Problem
from poptorch.store.cache import Cache, Wanted
from poptorch.store.container import write_container
from poptorch.store.trust import sign

FACTS = {"program": "p1", "engine": "inductor", "threads": "1", "torch": "2.13"}


def run(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one program, made for one thread."""
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    cache, wanted = Cache(tmp_path), Wanted(FACTS, "(x: f32[4]): step of 7 ops")
    parts = {"code/kernels.json": b"{}", "code/checksum": sign(b"{}").encode()}
    write_container(cache.path(wanted.key), {"facts": FACTS, "program": wanted.program}, parts)
    return cache


def test_ls_shows_the_programs_and_their_size(cache):
    output = run("cache", "ls")
    assert "step of 7 ops" in output
    assert f"1 program(s), 0.0 of 2048 MB in {cache.folder}" in output
    assert "0 program(s)" in run("cache", "--folder", str(cache.folder / "none"), "ls")


def test_explain_names_what_differs(cache):
    assert "nothing was looked for" in run("cache", "explain")
    cache.note_miss(Wanted({**FACTS, "threads": "4"}, "(x: f32[4]): step of 7 ops"))
    assert "threads: 1 there, 4 wanted" in run("cache", "explain")
    other = Wanted({**FACTS, "program": "p2"}, "(x: f32[9]): step of 8 ops")
    cache.note_miss(other)
    output = run("cache", "explain", other.key[:8])
    assert "step of 8 ops" in output
    assert "are new" in output
    cache.note_miss(Wanted(FACTS, ""))
    assert "is there now" in run("cache", "explain")


def test_verify_finds_what_is_damaged_and_removes_it_on_request(cache):
    assert "1 file(s)" in run("cache", "verify")
    (entry,) = cache.entries()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert re.search(r"BAD .*damaged", run("cache", "verify", code=1))
    run("cache", "verify", "--remove", code=1)
    assert "0 file(s)" in run("cache", "verify")


def test_verify_finds_what_somebody_else_made(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert "not made by this user" in run("cache", "verify", code=1)


def test_prune_empties_the_cache(cache):
    assert run("cache", "prune", "--megabytes", "1") == "removed 0 program(s)\n"
    assert run("cache", "prune") == "removed 1 program(s)\n"
    assert cache.entries() == []


def test_env_says_what_a_report_needs(monkeypatch):
    monkeypatch.setenv("POPTORCH_NUM_IPUS", "3")
    output = run("env")
    for text in (poptorch.__version__, "3 emulated", "POPTORCH_NUM_IPUS=3", "engine", "compiler", "cache"):
        assert text in output


def test_doctor_is_content_with_a_machine_that_has_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine.toolchain, "broken", lambda: None)  # building takes seconds
    monkeypatch.setattr(machine, "_ENOUGH_SHARED_NBYTES", 0)
    output = run("doctor")
    assert "BAD" not in output
    assert f"ok  cache: {tmp_path}" in output
    assert os.listdir(tmp_path) == []


def test_doctor_says_how_to_mend_what_is_wrong(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("POPTORCH_NUM_IPUS", "0")
    monkeypatch.setattr(machine.toolchain, "broken", lambda: Problem("the headers are missing", "install python3-dev"))
    monkeypatch.setattr(machine, "_ENOUGH_SHARED_NBYTES", 2**80)
    output = run("doctor", code=1)
    for text in ("install python3-dev", "POPTORCH_CACHE_DIR", "POPTORCH_NUM_IPUS", "--shm-size"):
        assert text in output
