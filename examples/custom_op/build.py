"""Build `cube.cpp` to a shared library, with the compiler settings that PyTorch's own extensions use."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).resolve().parent


def build(folder: Path) -> Path:
    """Build the library in a folder; gives its path."""
    extension = CppExtension("cube", [str(HERE / "cube.cpp")], extra_compile_args=["-O2"])
    command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)(
        Distribution({"ext_modules": [extension]})
    )
    command.build_lib, command.build_temp = str(folder), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    return folder / command.get_ext_filename("cube")


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "build"))
