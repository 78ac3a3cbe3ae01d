"""Whether native code can be built on this machine, and if not, why.

`missing` looks before anything is compiled, and costs nothing. `broken` is asked after a program could not be built: it
builds a program of one line, and so tells a machine that can build nothing from a program that cannot be built.
"""

from __future__ import annotations

import ctypes
import getpass
import locale
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poptorch.errors import EngineError

_PROBE = '#include <Python.h>\n#include <cmath>\nextern "C" double poptorch_probe(double x) { return std::cos(x); }\n'
_PROBE_SECONDS = 120  # on a machine that is busy with other things
_LITTLE_NBYTES = 256 * 2**20  # what PyTorch's precompiled header and a large model take while they are compiled


@dataclass(frozen=True)
class Problem:
    """Why there is no native code here, and what would change that."""

    what: str
    fix: str


class CannotBuild(EngineError):
    """Native code was asked for on a machine that cannot build any."""

    def __init__(self, message: str, problem: Problem, **more: Any) -> None:
        super().__init__(message, **more)
        self.problem = problem


def without_asserts() -> Problem | None:
    """PyTorch's code generator does some of its work in `assert` statements: without them it writes wrong code."""
    if not sys.flags.optimize:
        return None
    return Problem(
        "Python was started with -O, under which PyTorch's code generator writes wrong code",
        "start Python without -O and PYTHONOPTIMIZE",
    )


def missing() -> Problem | None:
    """What native code needs and is not there at all."""
    if find_compiler() is None:
        return Problem("no C++ compiler was found", "install g++ (for example `apt-get install g++`) and run again")
    encoding = locale.getpreferredencoding(False)
    try:
        "→".encode().decode(encoding)
    except UnicodeDecodeError:  # PyTorch reads files of its own, which are UTF-8, as the locale says
        return Problem(
            f"PyTorch's generator cannot be loaded in a locale with the encoding {encoding}", "set PYTHONUTF8=1"
        )
    try:
        folder = _folder()
    except OSError as error:
        return _unusable_folder(f"{error.filename} cannot be used: {error.strerror}")
    if len(folder.split()) != 1:  # commands are put together and taken apart at blanks
        return _unusable_folder(f"PyTorch cannot compile in {folder!r}, because of the blank in its name")
    return None


def find_compiler() -> str | None:
    """The C++ compiler to call: what CXX names, else g++ or clang++."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def broken() -> Problem | None:
    """Why not even the smallest program can be built, if that is so."""
    compiler = find_compiler()
    if compiler is None:
        return missing()
    try:
        with tempfile.TemporaryDirectory(dir=_folder(), prefix="poptorch-probe-") as folder:
            problem = _build_probe(compiler, folder)
    except OSError as error:
        return _unusable_folder(f"{_folder()} cannot be used: {error.strerror}")
    return problem or _lack_of_room(_folder()) or _lack_of_room(tempfile.gettempdir())


def _build_probe(compiler: str, folder: str) -> Problem | None:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    source = Path(folder, "probe.cpp")
    source.write_text(_PROBE, encoding="utf-8")
    try:
        _run([compiler, "--version"], folder)
        builder = CppBuilder("probe", [str(source)], CppTorchOptions(compiler=compiler), folder)
        _run(shlex.split(builder.get_command_line()), folder)
    except subprocess.TimeoutExpired:
        return _unusable_compiler(compiler, f"it did not compile one line in {_PROBE_SECONDS} s")
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").replace(f"{folder}{os.sep}", "").strip().splitlines()
        return _unusable_compiler(compiler, said[0] if said else f"it ended with code {error.returncode}")
    try:
        ctypes.CDLL(builder.get_target_file_path())
    except OSError:
        return _unusable_folder(f"code in {_folder()} cannot be executed")
    return None


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_PROBE_SECONDS)


def _folder() -> str:
    """Where PyTorch keeps the code that it generates; asking PyTorch itself would take seconds, so it is told."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # a user without a name
        user = f"uid_{os.getuid()}"
    usual = os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
    folder = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR", usual))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.makedirs(folder, exist_ok=True)
    return folder


def _unusable_compiler(compiler: str, why: str) -> Problem:
    fix = "repair it (for example `apt-get install --reinstall g++`), or let CXX name another compiler"
    return Problem(f"the C++ compiler {compiler} is broken ({why})", fix)


def _unusable_folder(what: str) -> Problem:
    return Problem(what, "let TORCHINDUCTOR_CACHE_DIR name a folder to write to and execute from")


def _lack_of_room(folder: str) -> Problem | None:
    free = shutil.disk_usage(folder).free
    if free >= _LITTLE_NBYTES:
        return None
    fix = "make room, or let TORCHINDUCTOR_CACHE_DIR and TMPDIR name folders with more of it"
    return Problem(f"only {free // 2**20} MB are free in {folder}, too little to compile", fix)
