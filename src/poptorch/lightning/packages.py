"""The two packages in which Lightning comes, and the names of each that we use.

`lightning.pytorch` and `pytorch_lightning` hold the same code twice, with classes and registries of their own. This is
the only module that imports from them, so everything of Lightning that we rely on, private names included, stands here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # package → where its Trainer is
FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
OLDEST, TOO_NEW = (2, 1), (3, 0)


@dataclass(frozen=True)
class Lightning:
    """One of the packages."""

    name: str
    Trainer: Any
    LightningModule: Any
    Accelerator: Any
    ParallelStrategy: Any
    Precision: Any
    MisconfigurationException: Any
    RunningStage: Any
    TrainerFn: Any
    AcceleratorRegistry: Any
    StrategyRegistry: Any
    GradientAccumulationScheduler: Any
    DataLoaderIterFetcher: Any
    IndexTracker: Any  # wraps a batch sampler, and remembers the indices that it gave
    MockOptimizer: Any  # what stands in for an optimiser that a module does not have
    is_overridden: Any
    takes: Any  # whether a hook has a parameter
    unify_precision: Any  # 16 → "16-mixed"
    warn: Any
    warn_deprecated: Any
    call_callbacks: Any
    call_module: Any

    @property
    def root(self) -> str:
        """The module that holds the Trainer."""
        return ROOTS[self.name]

    def set_rank(self, rank: int) -> None:
        """Tell the helpers that only work on rank zero which rank this process has."""
        for module in (f"{FABRICS[self.name]}.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
            importlib.import_module(module).rank_zero_only.rank = rank


def load(name: str) -> Lightning:
    """Import a package and collect its names; raises `ImportError` if it is too old or too new."""
    root, fabric = ROOTS[name], FABRICS[name]
    check_version(name)

    def of(module: str, attribute: str) -> Any:
        return getattr(importlib.import_module(f"{root}.{module}" if module else root), attribute)

    return Lightning(
        name=name,
        Trainer=of("", "Trainer"),
        LightningModule=of("", "LightningModule"),
        Accelerator=of("accelerators", "Accelerator"),
        ParallelStrategy=of("strategies", "ParallelStrategy"),
        Precision=of("plugins.precision", "Precision"),
        MisconfigurationException=of("utilities.exceptions", "MisconfigurationException"),
        RunningStage=of("trainer.states", "RunningStage"),
        TrainerFn=of("trainer.states", "TrainerFn"),
        AcceleratorRegistry=of("accelerators", "AcceleratorRegistry"),
        StrategyRegistry=of("strategies", "StrategyRegistry"),
        GradientAccumulationScheduler=of("callbacks", "GradientAccumulationScheduler"),
        DataLoaderIterFetcher=of("loops.fetchers", "_DataLoaderIterDataFetcher"),
        IndexTracker=of("overrides.distributed", "_IndexBatchSamplerWrapper"),
        MockOptimizer=of("core.optimizer", "_MockOptimizer"),
        is_overridden=of("utilities.model_helpers", "is_overridden"),
        takes=of("utilities.signature_utils", "is_param_in_hook_signature"),
        unify_precision=importlib.import_module(f"{fabric}.connector")._convert_precision_to_unified_args,
        warn=of("utilities.rank_zero", "rank_zero_warn"),
        warn_deprecated=of("utilities.rank_zero", "rank_zero_deprecation"),
        call_callbacks=of("trainer.call", "_call_callback_hooks"),
        call_module=of("trainer.call", "_call_lightning_module_hook"),
    )


def preferred() -> str:
    """The package that the program has imported already, or else the first that is installed."""
    found = [name for name in ROOTS if importlib.util.find_spec(name) is not None]
    if not found:
        raise ModuleNotFoundError(
            "poptorch.lightning needs Lightning: pip install lightning, or pip install pytorch-lightning.",
            name="lightning",
        )
    return next((name for name in found if ROOTS[name] in sys.modules), found[0])


def check_version(name: str) -> None:
    """Raise unless we know how to work with this version."""
    text: str = importlib.import_module(name).__version__
    version = tuple(int(part) for part in text.split(".")[:2])
    if not OLDEST <= version < TOO_NEW:
        raise ImportError(
            f"poptorch.lightning works with Lightning 2.1 to 2.6, and {name} is {text}. "
            "Versions before 2.1 have IPU support of their own: import IPUStrategy and IPUAccelerator from there."
        )
