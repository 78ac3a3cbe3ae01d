"""Lightning warns about much that tests do on purpose: few workers, few batches, no logger."""

from __future__ import annotations

import os
import random

import lightning.pytorch  # noqa: F401  before pytorch_lightning: names in poptorch.lightning belong to the first
import pytest
import torch

EXPECTED = [
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore::lightning_fabric.utilities.warnings.PossibleUserWarning",
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",
]


def pytest_collection_modifyitems(items):
    for item in items:
        if "lightning" in item.path.parts:
            for text in EXPECTED:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path, monkeypatch):
    """Random numbers, variables and the working folder are as before."""
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "POPLAR_ENGINE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    random.seed(0)
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "POPLAR_ENGINE_OPTIONS"):
        os.environ.pop(name, None)
