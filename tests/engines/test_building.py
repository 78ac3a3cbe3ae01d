"""Modules from parts: kernels as they come, and the code that calls them."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from pathlib import Path

import pytest

from poptorch.engines.building import Build, Tools, building, current_build, ending_builds_with_us
from poptorch.engines.compilers import CompilerError, Stopped
from poptorch.engines.headers import BACKGROUND, IN, OUT, Header

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TWICE = 'extern "C" int twice(int x) { return 2 * x; }\n'
THRICE = 'extern "C" int thrice(int x) { return 3 * x; }\n'
CALLS = (
    'extern "C" int twice(int); extern "C" int thrice(int); extern "C" int both(int x) { return twice(thrice(x)); }\n'
)
LONG = "\n" * 3000  # enough for a file of its own


@pytest.fixture
def new_build(tmp_path, monkeypatch):
    """Makes builds that keep their objects in one folder; the compiler notes what it is called for."""
    monkeypatch.setenv("POPTORCH_MACHINE_DIR", str(tmp_path / "machine"))
    monkeypatch.setattr(BACKGROUND, "begin", lambda headers, while_compiling: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    (tmp_path / "objects").mkdir(mode=0o700)

    def header(name: str, level: str) -> Header:
        return Header(name, ("cstdlib",), (str(compiler), level, "-fPIC", "-c", IN, "-o", OUT), "")

    tools = Tools(header("kernels", "-O2"), header("calls", "-O1"), (str(compiler), "-shared", IN, "-o", OUT))
    return lambda: Build(lambda: tools, tmp_path / "objects")


def compiled(tmp_path: Path) -> list[str]:
    """What the compiler was called for: the option for optimisation, or `-shared`, of each call."""
    lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return sorted(line.split()[0] for line in lines)


def load(content: bytes, tmp_path: Path) -> ctypes.CDLL:
    (tmp_path / "module.so").write_bytes(content)
    return ctypes.CDLL(str(tmp_path / "module.so"))


def finish(build: Build, *kernels: str, calls: str = CALLS) -> bytes:
    for kernel in kernels:
        build.add_kernel(kernel)
    build.add_calls(calls)
    build.finish()
    return build.content()


def test_short_kernels_share_a_file_and_are_optimised(new_build, tmp_path):
    assert load(finish(new_build(), TWICE, THRICE), tmp_path).both(7) == 42
    assert compiled(tmp_path) == ["-O1", "-O2", "-shared"]


def test_long_kernels_are_compiled_as_they_come(new_build, tmp_path):
    build = new_build()
    build.add_kernel(TWICE + LONG)
    assert len(build._parts) == 1  # although nothing calls it yet
    assert load(finish(build, THRICE), tmp_path).both(7) == 42
    assert compiled(tmp_path) == ["-O1", "-O2", "-O2", "-shared"]


def test_functions_of_several_parts_share_files_and_are_linked_once(new_build, tmp_path):
    build = new_build()
    for number in range(2):  # each says for itself what it includes, and calls what is static alike
        build.add_kernel(f'extern "C" int kernel{number}(int x) {{ return x + {number}; }}\n')
        build.add_calls(
            f'#include <cstdlib>\nextern "C" int kernel{number}(int);\n'
            f"static int twice(int x) {{ return 2 * std::abs(kernel{number}(x)); }}\n"
            'extern "C" int inductor_entry_cpp(int x) { return twice(x); }\n'
        )
    build.finish()
    library = load(build.content(), tmp_path)
    assert build.entries == ["inductor_entry_cpp_0", "inductor_entry_cpp_1"]
    assert [getattr(library, entry)(-7) for entry in build.entries] == [14, 12]
    assert compiled(tmp_path) == ["-O1", "-O2", "-shared"]


def test_long_calls_are_compiled_as_they_come(new_build, tmp_path):
    build = new_build()
    build.add_kernel(TWICE + THRICE)
    build.add_calls(CALLS + LONG)
    assert len(build._parts) == 1
    build.finish()
    assert load(build.content(), tmp_path).both(7) == 42


def test_without_functions_there_is_nothing_to_compile(new_build, tmp_path):
    new_build().finish()
    assert compiled(tmp_path) == []


def test_nothing_is_left_behind(new_build, tmp_path):
    finish(new_build(), TWICE, THRICE)
    assert not list(tmp_path.glob("poptorch-build-*"))


def test_objects_are_used_again(new_build, tmp_path):
    finish(new_build(), TWICE, THRICE)
    assert load(finish(new_build(), TWICE, THRICE), tmp_path).both(7) == 42
    assert compiled(tmp_path) == ["-O1", "-O2", "-shared", "-shared"]


def test_objects_that_others_could_have_written_are_not_used(new_build, tmp_path):
    finish(new_build(), TWICE, THRICE)
    for path in (tmp_path / "objects").iterdir():
        path.chmod(0o666)
        path.write_bytes(b"somebody else's")
    assert load(finish(new_build(), TWICE, THRICE), tmp_path).both(7) == 42


def test_an_error_in_a_part_is_raised_when_the_module_is_asked_for(new_build, tmp_path):
    with pytest.raises(CompilerError, match="nonsense"):
        finish(new_build(), "nonsense x;\n", TWICE + LONG)
    assert not list(tmp_path.glob("poptorch-build-*"))


def _generate_and_fail(build: Build) -> None:
    with building(build):
        current_build().add_kernel(TWICE + LONG)
        raise KeyboardInterrupt


def test_a_module_whose_generation_fails_is_not_built(new_build, tmp_path):
    build = new_build()
    with pytest.raises(KeyboardInterrupt):
        _generate_and_fail(build)
    assert not list(tmp_path.glob("poptorch-build-*"))
    build.add_calls(CALLS)
    build.finish()
    with pytest.raises(Stopped):
        build.content()


def test_all_builds_end_if_one_of_them_fails(new_build):
    def fail() -> None:
        with ending_builds_with_us() as builds:
            assert [new_build(), new_build()] == builds
            found.extend(builds)
            raise KeyboardInterrupt

    found: list[Build] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    first, _ = found
    first.add_calls(CALLS)
    first.finish()
    with pytest.raises(Stopped):
        first.content()
