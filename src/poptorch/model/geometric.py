"""Graphs of PyTorch Geometric as arguments and results of models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from poptorch._logging import logger
from poptorch.structure import ICustomArgParser, registerCustomArgParser


class GraphParser(ICustomArgParser):
    """Takes a graph apart, and puts one together, by its storages: one, or one per kind of node and edge."""

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        for storage in struct.stores:
            yield from (value for value in storage.values() if isinstance(value, torch.Tensor))

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        graph = copy.copy(original_structure)
        for storage in graph.stores:
            names = [name for name, value in storage.items() if isinstance(value, torch.Tensor)]
            for name in names:
                storage[name] = next(tensor_iterator)
        return graph


def registerGeometricCustomArgParsers() -> None:
    """Let `Data`, `HeteroData` and batches of PyTorch Geometric be passed to models; without that package, do nothing.

    A model is compiled for graphs of one size, so pad them to the same number of nodes and edges.
    """
    try:
        from torch_geometric.data import Data, HeteroData  # pyright: ignore[reportMissingImports]
    except ImportError:
        logger.info("PyTorch Geometric is not installed: there are no graphs to register parsers for.")
        return
    for kind in (Data, HeteroData):  # a batch is a subclass of what it is a batch of
        registerCustomArgParser(kind, GraphParser())
