"""How the packages come to know IPUs: registries, the arguments of the Trainer, and import paths of older releases."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from poptorch.lightning import accelerator, strategy
from poptorch.lightning.arguments import Family, resolved
from poptorch.lightning.family import for_package
from poptorch.lightning.packages import ROOTS, check_version

_OLD_PATHS = {  # below the root of a package: names that older releases had there
    "accelerators": ("IPUAccelerator",),
    "accelerators.ipu": ("IPUAccelerator",),
    "strategies": ("IPUStrategy",),
    "strategies.ipu": ("IPUStrategy", "LightningIPUModule"),
    "plugins": ("IPUPlugin", "IPUPrecisionPlugin"),
    "plugins.precision": ("IPUPrecisionPlugin",),
    "plugins.precision.ipu": ("IPUPrecisionPlugin",),
    "plugins.precision.ipu_precision": ("IPUPrecisionPlugin",),
    "plugins.training_type": ("IPUPlugin",),
    "plugins.training_type.ipu": ("IPUPlugin", "LightningIPUModule"),
}


class _Installation:
    """What was done to one package, and how to undo it."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._undo: list[Callable[[], object]] = []

    def register(self) -> None:
        package = self.family.package
        self.family.IPUAccelerator.register_accelerators(package.AcceleratorRegistry)
        self.family.IPUStrategy.register_strategies(package.StrategyRegistry)
        for registry, name in (
            (package.AcceleratorRegistry, accelerator.NAME),
            (package.StrategyRegistry, strategy.NAME),
        ):
            self._undo.append(functools.partial(registry.pop, name, None))

    def patch_trainer(self) -> None:
        """Let the constructor of the Trainer understand arguments about IPUs; all others pass unchanged."""
        trainer, family = self.family.package.Trainer, self.family
        original = trainer.__init__
        if hasattr(original, "without_ipus"):
            return

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, ipus: int | None = None, **kwargs: Any) -> None:  # noqa: N807
            if args:
                original(self, *args, **kwargs)  # a Trainer takes none, and says so
            else:
                original(self, **resolved(family, kwargs, ipus))

        vars(__init__)["without_ipus"] = original
        trainer.__init__ = __init__
        self._undo.append(lambda: setattr(trainer, "__init__", original))

    def add_old_paths(self) -> None:
        root = self.family.package.root
        for path, names in _OLD_PATHS.items():
            module = self._module(f"{root}.{path}")
            for name in names:
                self._set(module, name, self.family.named(name))

    def _module(self, path: str) -> ModuleType:
        """The module of this path; a new, empty one if there is none, or one that only says where things have gone."""
        found = sys.modules.get(path)
        is_stub = found is not None and "_graveyard" in str(getattr(found, "__file__", "") or found.__name__)
        if found is not None and not is_stub:
            return found
        try:
            return importlib.import_module(path)
        except ImportError:
            module = ModuleType(path, "A module of older releases of Lightning.")
        sys.modules[path] = module
        self._undo.append(functools.partial(sys.modules.pop, path, None))
        parent, _, name = path.rpartition(".")
        self._set(sys.modules[parent], name, module)
        return module

    def _set(self, module: ModuleType, name: str, value: Any) -> None:
        absent = object()
        before = vars(module).get(name, absent)
        if before is value:
            return
        setattr(module, name, value)
        if before is absent:
            self._undo.append(lambda: delattr(module, name) if hasattr(module, name) else None)
        else:
            self._undo.append(lambda: setattr(module, name, before))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


class _Installations(dict[str, _Installation]):
    """By the names of the packages; `uninstall` also ends what happens by itself."""

    is_automatic = True


_installations = _Installations()


def _chosen(package: str | None) -> list[_Installation]:
    names = [package] if package is not None else [name for name, root in ROOTS.items() if root in sys.modules]
    for name in names:
        if name not in _installations:
            _installations[name] = _Installation(for_package(name))
    return [_installations[name] for name in names]


def register(package: str | None = None) -> None:
    """Add `"ipu"` and `"ipu_strategy"` to the registries of a package, or of both as far as they are imported."""
    for installation in _chosen(package):
        installation.register()


def install_legacy_api(package: str | None = None) -> None:
    """Let `Trainer(ipus=...)` and the import paths of older releases work in a package, or in both."""
    for installation in _chosen(package):
        installation.patch_trainer()
        installation.add_old_paths()


def uninstall() -> None:
    """Take everything back that `register` and `install_legacy_api` have done, and leave later imports alone."""
    _installations.is_automatic = False
    for installation in _installations.values():
        installation.remove()


def install(package: str) -> None:
    """Make a package that has just been imported know IPUs, if it is one that we know."""
    try:
        check_version(package)
    except ImportError:
        return
    if _installations.is_automatic:
        register(package)
        install_legacy_api(package)
