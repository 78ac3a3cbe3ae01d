"""Executables in files and in the cache: one container format, native code that only its maker runs, and the folder."""

from poptorch.store.cache import Cache, cache_folder, compile_cached, find_cached
from poptorch.store.container import Container, read_container, write_container
from poptorch.store.files import code_parts, executable_parts, read_executable, read_kernels
from poptorch.store.tensors import tensors_from, tensors_part

__all__ = [
    "Cache",
    "Container",
    "cache_folder",
    "code_parts",
    "compile_cached",
    "executable_parts",
    "find_cached",
    "read_container",
    "read_executable",
    "read_kernels",
    "tensors_from",
    "tensors_part",
    "write_container",
]
