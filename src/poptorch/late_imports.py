"""Run a function as soon as another package is imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from poptorch import environment
from poptorch._logging import logger

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


class _Watcher(MetaPathFinder):
    """Finds nothing itself; lets the loaders of some modules call functions when they are done."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._being_found: set[str] = set()
        self.complete: set[str] = set()  # modules that have run, although Python may not have finished importing them

    def add(self, module: str, function: Callable[[], None]) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._waiting.setdefault(module, []).append(function)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting or fullname in self._being_found:
            return None
        self._being_found.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)  # by the other finders
        finally:
            self._being_found.remove(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Telling(spec.loader, partial(self._finish, fullname))
        return spec

    def _finish(self, module: str) -> None:
        self.complete.add(module)
        for function in self._waiting.pop(module, []):
            function()


class _Telling(Loader):
    """A loader that calls a function after the module has run; everything else is the real loader's."""

    def __init__(self, loader: Any, function: Callable[[], None]) -> None:
        self._loader, self._function = loader, function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._function()


_watcher = _Watcher()


def run_after_import(module: str, function: Callable[[], None]) -> None:
    """Call a function when a module has been imported; at once if it has been already."""
    loaded = sys.modules.get(module)
    if loaded is None:
        _watcher.add(module, function)
    elif module in _watcher.complete or not getattr(loaded.__spec__, "_initializing", False):
        function()


def configure() -> None:
    """Introduce IPUs to Lightning as soon as a program imports that."""
    if environment.LIGHTNING_AUTOLOAD.flag():
        for module in LIGHTNING:
            run_after_import(module, _introduce)


def _introduce() -> None:
    """A Lightning that we do not know must still be importable; `import poptorch.lightning` says what is wrong."""
    try:
        importlib.import_module("poptorch.lightning")
    except Exception as error:
        logger.debug("Lightning does not get to know IPUs: %s: %s", type(error).__name__, error)
