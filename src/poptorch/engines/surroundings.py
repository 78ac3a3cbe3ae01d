"""What generated code depends on beside the program: versions, processor, compiler, threads and settings.

Code is used again only where all of this is the same. Each fact has a name, so that it can be said which one differs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from poptorch import environment
from poptorch._version import __version__
from poptorch.engines.toolchain import find_compiler

_SETTINGS = ("TORCHINDUCTOR_", "ATEN_CPU_CAPABILITY", "OMP_", "KMP_", "MKL_", "CXXFLAGS", "CPATH")
_WITHOUT_EFFECT = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")


def surroundings() -> dict[str, str]:
    """Every fact that code generated now depends on."""
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_SETTINGS) and k not in _WITHOUT_EFFECT)
    return {
        **_fixed(),
        "threads": str(torch.get_num_threads()),  # Inductor writes the number into its loops
        "compiler": _compiler(),
        "settings": " ".join(settings),
        "alike layers": environment.ALIKE_LAYERS.read(),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()),  # pyright: ignore
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


@functools.cache
def _fixed() -> dict[str, str]:
    """What cannot change while a process runs."""
    return {
        "poptorch": __version__,
        "source": _source_digest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{sys.implementation.cache_tag} {platform.platform()}",
        "processor": f"{torch.backends.cpu.get_cpu_capability()} {_processor()}",
    }


def _source_digest() -> str:
    """A name for the code that makes kernels out of programs, so that a change of it counts even within a version."""
    found = hashlib.sha256()
    package = Path(__file__).parent.parent
    for folder in ("engines", "ir"):
        for file in sorted((package / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _processor() -> str:
    """Architecture, model and a digest of the features of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line and line.startswith(wanted))
    named = {name.strip(): value.strip() for name, value in facts.items()}
    features = " ".join(sorted((named.get("flags") or named.get("Features") or "").split()))
    return f"{named.get('model name', platform.machine())} {hashlib.sha256(features.encode()).hexdigest()[:16]}"


def _compiler() -> str:
    """Which compiler there is; a new one at the same place has another size or date."""
    path = shutil.which(find_compiler() or "")
    if path is None:
        return "none"
    real = os.path.realpath(path)
    status = os.stat(real)
    return f"{real} {status.st_size} {int(status.st_mtime)}"
