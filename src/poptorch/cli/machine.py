"""What the machine is, and whether it has what poptorch needs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import poptorch
from poptorch import environment
from poptorch.engines import surroundings, toolchain
from poptorch.ipu import number_of_ipus
from poptorch.store import Cache, cache_folder, trust

_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_NBYTES = 64 * 2**20  # a container of Docker has this much, and a loader of large batches needs more


def facts() -> dict[str, str]:
    """Everything that a bug report should say about a machine."""
    here = surroundings()
    changed = [f"{v.name}={v.read()}" for v in environment.VARIABLES if v.name in os.environ]
    return {
        "poptorch": poptorch.__version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "processor": here["processor"],
        "threads": here["threads"],
        "engine": _engine(),
        "compiler": here["compiler"],
        "cache": _cache(),
        "IPUs": f"{number_of_ipus()} emulated",
        "variables": " ".join(changed) or "none",
    }


def _engine() -> str:
    asked = environment.ENGINE.read()
    problem = toolchain.without_asserts() or toolchain.missing()
    return asked or ("inductor" if problem is None else f"eager, because {problem.what}")


def _cache() -> str:
    if not environment.CACHE.flag():
        return "off"
    try:
        cache = Cache(cache_folder(environment.CACHE_DIR.read()))
        return f"{cache.folder}, {len(cache.entries())} program(s)"
    except OSError as error:
        return f"none: {error}"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `problem` says how to mend it if it is not right."""

    subject: str
    state: str
    problem: str | None = None


def examine() -> list[Finding]:
    """Look at everything that compiling a model, keeping it and loading data need."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _compiler,
        _headers,
        _cache_folder,
        _key,
        _shared_memory,
        _ipus,
    )
    return [check() for check in checks]


def _python() -> Finding:
    problem = toolchain.without_asserts()
    version = f"{platform.python_version()}, torch {torch.__version__}"
    return Finding("Python", version, None if problem is None else problem.fix)


def _compiler() -> Finding:
    problem = toolchain.missing()
    if problem is not None:
        return Finding("compiler", problem.what, problem.fix)
    return Finding("compiler", shutil.which(toolchain.find_compiler() or "") or "")


def _headers() -> Finding:
    """Build a program of one line, with the headers of Python and PyTorch."""
    if toolchain.find_compiler() is None:
        return Finding("native code", "there is no compiler", "install g++ (for example `apt-get install g++`)")
    problem = toolchain.broken()
    if problem is not None:
        return Finding("native code", problem.what, problem.fix)
    return Finding("native code", "a program with the headers of Python was built and loaded")


def _cache_folder() -> Finding:
    fix = f"let {environment.CACHE_DIR.name} name a folder to write to, or switch it off: {environment.CACHE.name}=0"
    try:
        folder = cache_folder(environment.CACHE_DIR.read())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            pass
    except OSError as error:
        return Finding("cache", str(error), fix)
    return Finding("cache", str(folder))


def _key() -> Finding:
    fix = "let XDG_STATE_HOME name a folder of your own; without it native code is compiled anew in every process"
    if trust.sign(b"") is None:
        return Finding("key for native code", "there is no private place for it", fix)
    return Finding("key for native code", str(trust.key_file()))


def _shared_memory() -> Finding:
    if not _SHARED_MEMORY.is_dir():
        return Finding("shared memory", f"this {sys.platform} has no {_SHARED_MEMORY}")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    fix = "give it more (docker run --shm-size=2g), or load data with num_workers=0"
    state = f"{free // 2**20} MB free in {_SHARED_MEMORY}"
    return Finding("shared memory", state, fix if free < _ENOUGH_SHARED_NBYTES else None)


def _ipus() -> Finding:
    count = number_of_ipus()
    fix = f"set {environment.NUM_IPUS.name} to how many there should be, or run on the IPU model"
    return Finding("IPUs", f"{count} emulated", None if count else fix)
