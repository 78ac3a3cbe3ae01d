"""The arguments of a Trainer that concern IPUs, brought into the form that Lightning understands."""

from __future__ import annotations

import os
from ast import literal_eval
from dataclasses import dataclass
from typing import Any

from poptorch import environment
from poptorch.lightning import accelerator, strategy
from poptorch.lightning.accelerator import AcceleratorBehaviour
from poptorch.lightning.module import LightningIPUModule
from poptorch.lightning.packages import Lightning
from poptorch.lightning.precision import PrecisionBehaviour
from poptorch.lightning.strategy import StrategyBehaviour

_FROM_ENVIRONMENT = ("accelerator", "devices", "strategy", "precision")


@dataclass(frozen=True)
class Family:
    """The classes for one of the packages."""

    package: Lightning
    IPUAccelerator: Any
    IPUPrecision: Any
    IPUStrategy: Any
    IPUPlugin: Any
    Trainer: Any = None

    @property
    def IPUPrecisionPlugin(self) -> Any:
        """The older name of `IPUPrecision`."""
        return self.IPUPrecision

    def own(self, value: Any) -> Any:
        """The same object in this family, if it belongs to the other one."""
        if not vars(type(value)).get("is_stock") or type(value) in self.classes:
            return value
        kind = next(kind for kind in self.classes if kind.__name__ == type(value).__name__)
        if isinstance(value, StrategyBehaviour):
            return kind(**{name: self.own(given) for name, given in value.given.items()})
        return kind(value.precision) if isinstance(value, PrecisionBehaviour) else kind()

    def named(self, name: str) -> Any:
        """One of the names of `poptorch.lightning`."""
        return LightningIPUModule if name == "LightningIPUModule" else getattr(self, name)

    @property
    def classes(self) -> tuple[Any, ...]:
        return self.IPUAccelerator, self.IPUPrecision, self.IPUStrategy, self.IPUPlugin


def resolved(family: Family, arguments: dict[str, Any], ipus: int | None) -> dict[str, Any]:
    """The arguments for Lightning's own constructor; the very same if none of them is about IPUs."""
    given = {**_environment(arguments), **arguments}
    if not _mentions_ipus(given, ipus):
        return arguments
    given = _take_ipus(family, given, ipus)
    given = _take_plugins(family, given)
    return _complete(family, given) if _chooses_ipus(family, given) else given


def _environment(arguments: dict[str, Any]) -> dict[str, Any]:
    """Defaults that Lightning takes from variables such as PL_TRAINER_ACCELERATOR."""
    found: dict[str, Any] = {}
    for name in _FROM_ENVIRONMENT:
        text = os.environ.get(f"PL_TRAINER_{name.upper()}")
        if text and name not in arguments:
            found[name] = int(text) if text.lstrip("-").isdigit() else literal_eval(text) if text[0] in "[(" else text
    return found


def _mentions_ipus(given: dict[str, Any], ipus: int | None) -> bool:
    plugins = _as_list(given.get("plugins"))
    ours = (StrategyBehaviour, PrecisionBehaviour, AcceleratorBehaviour)
    values = [given.get("accelerator"), given.get("strategy"), *plugins]
    names = (accelerator.NAME, strategy.NAME)
    is_auto = given.get("accelerator", "auto") == "auto" and environment.LIGHTNING_AUTO.flag()
    return (
        ipus is not None or is_auto or any(isinstance(v, ours) or (isinstance(v, str) and v in names) for v in values)
    )


def _as_list(plugins: Any) -> list[Any]:
    if plugins is None:
        return []
    return list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]


def _take_ipus(family: Family, given: dict[str, Any], ipus: int | None) -> dict[str, Any]:
    """`ipus=8` is the older way to say `accelerator="ipu", devices=8`."""
    if ipus is None:
        is_auto = given.get("accelerator", "auto") == "auto" and environment.LIGHTNING_AUTO.flag()
        return {**given, "accelerator": accelerator.NAME} if is_auto and "strategy" not in given else given
    package = family.package
    if isinstance(ipus, bool) or not isinstance(ipus, int) or ipus < 1:
        raise package.MisconfigurationException(f"`Trainer(ipus={ipus!r})`: `ipus` is a single number, at least 1.")
    package.warn_deprecated(
        f"`Trainer(ipus={ipus})` is the older way to say `Trainer(accelerator='ipu', devices={ipus})`."
    )
    chosen = given.get("accelerator")
    if chosen not in (None, "auto", accelerator.NAME) and not isinstance(chosen, AcceleratorBehaviour):
        package.warn(f"`Trainer(ipus={ipus})` will be ignored, because `accelerator={chosen!r}` is given.")
        return given
    devices = given.get("devices", "auto")
    if devices not in (None, "auto", ipus):
        package.warn(f"`Trainer(devices={devices!r})` will be ignored, because `ipus={ipus}` is given.")
    return {**given, "accelerator": chosen if isinstance(chosen, AcceleratorBehaviour) else "ipu", "devices": ipus}


def _take_plugins(family: Family, given: dict[str, Any]) -> dict[str, Any]:
    """A strategy among the plugins is moved to where Lightning expects it, and objects join this family."""
    plugins = [family.own(plugin) for plugin in _as_list(given.get("plugins"))]
    strategies = [plugin for plugin in plugins if isinstance(plugin, StrategyBehaviour)]
    chosen = family.own(given.get("strategy", "auto"))
    if strategies:
        if len(strategies) > 1 or chosen != "auto":
            raise family.package.MisconfigurationException(
                "the IPU strategy was given more than once: choose one, as `Trainer(strategy=...)`."
            )
        chosen = strategies[0]
        plugins = [plugin for plugin in plugins if plugin is not chosen]
    given = {**given, "strategy": chosen, "accelerator": family.own(given.get("accelerator", "auto"))}
    if "plugins" in given:
        given["plugins"] = plugins or None
    return given


def _chooses_ipus(family: Family, given: dict[str, Any]) -> bool:
    chosen, plan = given["accelerator"], given["strategy"]
    if isinstance(chosen, AcceleratorBehaviour) or chosen == accelerator.NAME:
        return True
    is_ours = isinstance(plan, StrategyBehaviour) or _is_name(plan)
    has_precision = any(isinstance(plugin, PrecisionBehaviour) for plugin in _as_list(given.get("plugins")))
    if (is_ours and chosen != "auto") or (has_precision and not is_ours):
        part = "strategy" if is_ours else "precision"
        raise family.package.MisconfigurationException(
            f"`Trainer(accelerator={chosen!r})` contradicts the {part} of IPUs: choose `accelerator='ipu'`."
        )
    return is_ours


def _is_name(plan: Any) -> bool:
    return isinstance(plan, str) and plan.lower() == strategy.NAME


def _complete(family: Family, given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what Lightning would choose wrongly for an accelerator that it does not know."""
    fail = family.package.MisconfigurationException
    plan = given["strategy"]
    if plan == "auto" or _is_name(plan):
        if not family.IPUAccelerator.is_available():
            return {**given, "strategy": "auto", "accelerator": family.IPUAccelerator()}  # Lightning refuses
        plan = family.IPUStrategy()
    if not isinstance(plan, StrategyBehaviour):
        raise fail(f"`Trainer(accelerator='ipu', strategy={plan!r})`: IPUs need the strategy 'ipu_strategy'.")
    if given.get("sync_batchnorm"):
        raise fail("`Trainer(sync_batchnorm=True)` is not supported on IPUs: statistics are those of each micro-batch.")
    if given.get("num_nodes", 1) > 1 and not plan.is_distributed:
        raise fail(
            "`Trainer(num_nodes=...)` needs a program that was started as several processes, with poprun or MPI."
        )
    devices = given.get("devices", "auto")
    plan._devices_are_explicit = devices not in (None, "auto")
    if devices in (None, "auto") and plan.replication_factor:
        devices = plan.replication_factor  # of the user's options
    completed = {**given, "strategy": plan, "devices": devices}
    if given["accelerator"] == accelerator.NAME or (given["accelerator"] == "auto" and plan._accelerator is None):
        completed["accelerator"] = family.IPUAccelerator()
    if not any(isinstance(plugin, PrecisionBehaviour) for plugin in _as_list(given.get("plugins"))):
        if plan._precision_plugin is None:
            plan.precision_plugin = family.IPUPrecision(given.get("precision"))
        completed["precision"] = None
    return completed
