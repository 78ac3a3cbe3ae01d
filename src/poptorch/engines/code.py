"""Native code in memory: what was built now, or bytes of it that are loaded again.

Such code is a Python extension module with one function, which takes and gives handles of tensors.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ENTRY = "inductor_entry_cpp"  # the name of module and function
to_handles: Callable[[list[torch.Tensor]], list[Any]] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors  # pyright: ignore
to_tensors: Callable[[list[Any]], list[torch.Tensor]] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # pyright: ignore


@dataclass(frozen=True)
class NativeCode:
    """A compiled function, and what Inductor's Python wrapper around it calls in the end, if that is known."""

    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    native: Callable[[Any], Any] | None
    writes_in_place: bool  # otherwise it returns new values after the others
    content: bytes | None = None  # the bytes to load the same code from, unless there is more to it: calls of Python

    @classmethod
    def of(cls, function: Any, *, writes_in_place: bool) -> NativeCode:
        """Code from the function that Inductor gives for it; waits until it is built."""
        deferred = inspect.getclosurevars(function).nonlocals.get("f") if inspect.isfunction(function) else None
        if not isinstance(deferred, Deferred):
            return cls(function, None, writes_in_place)  # not the wrapper we know
        native = deferred.get()
        if "constants_tensor" in function.__code__.co_varnames:
            return cls(function, None, writes_in_place)  # a wrapper that adds tensors of its own
        return cls(function, native, writes_in_place, deferred.content if writes_in_place else None)


class Deferred:
    """The function of a module that is being built: what becomes one as soon as somebody asks."""

    def __init__(self, wait: Callable[[], bytes]) -> None:
        self._wait = wait
        self._native: Any = None
        self.content: bytes | None = None

    def get(self) -> Callable[[Any], Any]:
        """The function itself; waits until it is there. Raises what went wrong."""
        if self._native is None:
            self.content = self._wait()
            self._native = load_code(self.content).native
        return self._native

    def __call__(self, handles: Any) -> Any:
        return self.get()(handles)


def load_code(content: bytes) -> NativeCode:
    """Code from bytes that were the `content` of code that writes in place. This runs it: the bytes must be ours."""
    # What the module asks for when it is loaded: how to find the memory of a tensor.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # pyright: ignore
    )
    name = f"poptorch_{hashlib.sha256(content).hexdigest()}.{_ENTRY}"  # Python tells modules apart by path and name
    with _as_file(content) as path:
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    sys.modules.pop(name, None)  # tools that read the files of all modules would wait for whatever the path is then
    module.__file__ = None
    native = getattr(module, _ENTRY)

    def function(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return to_tensors(native(to_handles(arguments)))

    return NativeCode(function, native, writes_in_place=True, content=content)


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
