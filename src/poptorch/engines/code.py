"""Native code in memory: what was built now, or bytes of it that are loaded again.

Such code is a library that holds Python extension modules with one function each, which has the name of its module, and
takes and gives handles of tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

to_handles: Callable[[list[torch.Tensor]], list[Any]] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors  # pyright: ignore
to_tensors: Callable[[list[Any]], list[torch.Tensor]] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # pyright: ignore


@dataclass(frozen=True)
class NativeCode:
    """A compiled function, and what Inductor's Python wrapper around it calls in the end, if that is known."""

    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    native: Callable[[Any], Any] | None
    writes_in_place: bool  # otherwise it returns new values after the others
    content: bytes | None = None  # the library to load the same code from, unless there is more to it: calls of Python
    entry: str = ""  # its name there

    @classmethod
    def of(cls, function: Any, *, writes_in_place: bool) -> NativeCode:
        """Code from the function that Inductor gives for it; waits until it is built."""
        deferred = inspect.getclosurevars(function).nonlocals.get("f") if inspect.isfunction(function) else None
        if not isinstance(deferred, Deferred):
            return cls(function, None, writes_in_place)  # not the wrapper we know
        native = deferred.get()
        if "constants_tensor" in function.__code__.co_varnames:
            return cls(function, None, writes_in_place)  # a wrapper that adds tensors of its own
        content = deferred.library.codes[deferred.entry].content if writes_in_place else None
        return cls(function, native, writes_in_place, content, deferred.entry)


class Library:
    """What is being built: functions that are there as soon as somebody asks for one, when no more are added."""

    def __init__(self, wait: Callable[[], bytes], entries: Sequence[str]) -> None:
        self._wait, self._entries = wait, entries

    @cached_property
    def codes(self) -> dict[str, NativeCode]:
        """All functions by their names; waits until they are there. Raises what went wrong."""
        return load_codes(self._wait(), self._entries)


@dataclass(frozen=True)
class Deferred:
    """A function of a library that is being built."""

    library: Library
    entry: str

    def get(self) -> Callable[[Any], Any]:
        """The function itself; waits until it is there. Raises what went wrong."""
        native = self.library.codes[self.entry].native
        assert native is not None
        return native

    def __call__(self, handles: Any) -> Any:
        return self.get()(handles)


def load_codes(content: bytes, entries: Iterable[str]) -> dict[str, NativeCode]:
    """Codes from bytes that were the `content` of codes that write in place, by their names in there.

    This runs them: the bytes must be ours.
    """
    # What the module asks for when it is loaded: how to find the memory of a tensor.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # pyright: ignore
    )
    digest = hashlib.sha256(content).hexdigest()
    with _as_file(content) as path:
        return {entry: _load(content, path, f"poptorch_{digest}.{entry}", entry) for entry in entries}


def _load(content: bytes, path: str, name: str, entry: str) -> NativeCode:
    """Code from a file with this content; Python tells modules apart by path and name."""
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules.pop(name, None)  # tools that read the files of all modules would wait for whatever the path is then
    module.__file__ = None
    native = getattr(module, entry)

    def function(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return to_tensors(native(to_handles(arguments)))

    return NativeCode(function, native, writes_in_place=True, content=content, entry=entry)


_LOADED = itertools.count(1)


def _detour(number: int) -> str:
    """A way from a folder to itself, spelled differently for each number.

    The loader takes paths of the same spelling for the same library, and numbers of descriptors are used again.
    """
    return "".join("./" if digit == "1" else ".//" for digit in f"{number:b}")


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path to load these very bytes from: in memory where the system can do that, else in a private folder."""
    with contextlib.ExitStack() as stack:
        descriptor = -1
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.memfd_create("poptorch")
        if descriptor >= 0:
            stack.enter_context(open(descriptor, "wb", buffering=0)).write(content)
            yield f"/proc/self/{_detour(next(_LOADED))}fd/{descriptor}"
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="poptorch-code-"))  # of mode 0700
        path = Path(folder, "code.so")
        path.write_bytes(content)
        yield str(path)
