"""Compare graphs, and give each a name that only depends on what it computes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from poptorch.ir.graph import StepGraph
from poptorch.ir.serial import Data, graph_data, origin_data


def are_equal(a: StepGraph, b: StepGraph) -> bool:
    """Whether two graphs compute the same by the same ops, which come from the same lines."""
    if (graph_data(a), origin_data(a)) != (graph_data(b), origin_data(b)) or a.constants.keys() != b.constants.keys():
        return False
    return all(_are_same(value, b.constants[name]) for name, value in a.constants.items())


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def graph_digest(graph: StepGraph) -> str:
    """A name for what a graph computes: the same in every process, whatever file the model was written in."""
    return digest(graph_data(graph), graph.constants)


def digest(data: Data, tensors: Mapping[str, torch.Tensor]) -> str:
    """A name for plain data and the tensors that belong to them."""
    found = hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"\0{name} {value.dtype} {list(value.shape)}\0".encode())
        found.update(_bytes(value))
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
