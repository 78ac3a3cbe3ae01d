"""The classes for one of the packages, and how that package comes to know them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from poptorch.lightning import packages
from poptorch.lightning.accelerator import AcceleratorBehaviour
from poptorch.lightning.arguments import Family, resolved
from poptorch.lightning.packages import Lightning
from poptorch.lightning.plugin import PluginBehaviour
from poptorch.lightning.precision import PrecisionBehaviour
from poptorch.lightning.strategy import StrategyBehaviour

_HOME = "poptorch.lightning"


def for_package(name: str) -> Family:
    """The classes for `"lightning"` or `"pytorch_lightning"`; each package only takes its own."""
    importlib.import_module(packages.ROOTS[name])  # which may ask for this very family when it is done
    return _family(name)


@functools.cache
def _family(name: str) -> Family:
    package = packages.load(name)
    accelerator = _stock("IPUAccelerator", "Emulated IPUs.", package, AcceleratorBehaviour, package.Accelerator)
    precision = _stock(
        "IPUPrecision", "The types of a model's numbers.", package, PrecisionBehaviour, package.Precision
    )
    parts = {"accelerator_class": accelerator, "precision_class": precision}
    strategy = _stock(
        "IPUStrategy", "Runs steps as compiled programs.", package, StrategyBehaviour, package.ParallelStrategy, **parts
    )
    plugin = _stock("IPUPlugin", "The older name of IPUStrategy.", package, PluginBehaviour, strategy)
    trainer = _trainer(package)
    family = Family(package, accelerator, precision, strategy, plugin, trainer)
    trainer.family = family
    return family


def _stock(name: str, text: str, package: Lightning, behaviour: type, base: type, **more: Any) -> Any:
    names = {"package": package, "is_stock": True, "__module__": _HOME, "__doc__": text, **more}
    return type(base)(name, (behaviour, base), names)


def _trainer(package: Lightning) -> Any:
    class Trainer(package.Trainer):
        """A Trainer that knows IPUs by itself, also as `ipus=8`."""

        family: Any

        def __init__(self, *, ipus: int | None = None, **kwargs: Any) -> None:
            start = package.Trainer.__init__
            start = getattr(start, "without_ipus", start)
            start(self, **resolved(type(self).family, kwargs, ipus))

    Trainer.__module__, Trainer.__qualname__ = _HOME, "Trainer"
    return Trainer
