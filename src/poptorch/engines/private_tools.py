"""A second door to private parts of PyTorch for this folder: its build tools, each imported when it is asked for.

They are wanted where native code may never be generated, so they must not bring the generator along. Each has a test in
tests/engines/test_private.py.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile


def cache_folder() -> str:
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


def build_command(compiler: str, source: str, folder: str) -> tuple[str, str]:
    """The command line by which PyTorch would build a source file in a folder, and the file that it makes."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    builder = CppBuilder("probe", [source], CppTorchOptions(compiler=compiler), folder)
    return builder.get_command_line(), builder.get_target_file_path()
