"""Whether this machine can build native code."""

from __future__ import annotations

import pytest

from poptorch.engines import toolchain

needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def programs_on_the_path(monkeypatch, tmp_path):
    """Makes programs of these names the only ones there are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    def have(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)

    return have


@pytest.mark.parametrize(
    ("programs", "named", "found"),
    [
        (["g++", "clang++"], None, "g++"),
        (["clang++"], None, "clang++"),
        (["g++", "c++-13"], "c++-13", "c++-13"),
        (["g++"], "c++-13", "g++"),
        (["ccache", "g++"], "ccache g++", "g++"),
        (["cc"], None, None),
    ],
)
def test_the_compiler_is_the_named_one_or_one_that_is_there(programs, named, found, programs_on_the_path, monkeypatch):
    programs_on_the_path(*programs)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    assert toolchain.find_compiler() == found
    assert (toolchain.missing() is None) is (found is not None)


@needs_compiler
def test_a_machine_with_a_compiler_is_not_broken(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert toolchain.missing() is None
    assert toolchain.broken() is None
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "folder"))
    assert toolchain.missing().what.startswith(f"{file}/folder cannot be used: ")


@needs_compiler
def test_a_folder_with_a_blank_in_its_name_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "my cache"))
    assert "my cache" in toolchain.missing().what


@needs_compiler
def test_a_locale_in_which_pytorch_cannot_read_its_files_is_named(monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda do_setlocale=True: "ascii")
    problem = toolchain.missing()
    assert "encoding ascii" in problem.what
    assert "PYTHONUTF8=1" in problem.fix


@needs_compiler
def test_lack_of_room_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "_LITTLE_NBYTES", 2**80)
    assert f"MB are free in {tmp_path}" in toolchain.broken().what
