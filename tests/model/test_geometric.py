"""Graphs as arguments and results, with a stand-in for PyTorch Geometric that has its storages."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest
import torch

import poptorch
from models import Apply


class Graph:
    """Attributes in a storage that behaves like a dictionary, as in PyTorch Geometric; a copy has its own storage."""

    def __init__(self, **values: object) -> None:
        self._store = values

    @property
    def stores(self) -> list[dict[str, object]]:
        return [self._store]

    def __copy__(self) -> Graph:
        twin = type(self).__new__(type(self))
        twin._store = copy.copy(self._store)
        return twin

    def __getattr__(self, name: str):
        if name in vars(self).get("_store", {}):
            return self._store[name]
        raise AttributeError(name)


class HeteroGraph(Graph):
    """Two kinds of nodes, each with a storage."""

    def __init__(self, users: dict[str, object], items: dict[str, object]) -> None:
        self._store, self._items = users, items

    @property
    def stores(self) -> list[dict[str, object]]:
        return [self._store, self._items]

    def __copy__(self) -> HeteroGraph:
        return HeteroGraph(copy.copy(self._store), copy.copy(self._items))


class GraphBatch(Graph):
    pass


@pytest.fixture
def geometric(monkeypatch):
    package, data = ModuleType("torch_geometric"), ModuleType("torch_geometric.data")
    vars(data).update(Data=Graph, HeteroData=HeteroGraph)
    monkeypatch.setitem(sys.modules, "torch_geometric", package)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", data)
    poptorch.registerGeometricCustomArgParsers()
    yield
    for kind in (Graph, HeteroGraph):
        poptorch.registerCustomArgParser(kind, None)


def wrap(function) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(Apply(function), poptorch.Options().engine("eager"))


@pytest.mark.usefixtures("geometric")
def test_graph_goes_in_and_comes_out_with_everything_it_has():
    def forward(graph):
        assert isinstance(graph, GraphBatch)
        graph.stores[0]["x"] = graph.x[graph.edge_index[0]] * 2
        return graph

    model = wrap(forward)
    for value in (1.0, 5.0):
        given = GraphBatch(x=torch.full((2, 3), value), edge_index=torch.tensor([[0, 1], [1, 0]]), name="ring")
        result = model(given)
        assert type(result) is GraphBatch
        assert result.name == "ring"
        assert result.x.tolist() == [[2 * value] * 3] * 2
        assert given.x.tolist() == [[value] * 3] * 2


@pytest.mark.usefixtures("geometric")
def test_graph_with_several_kinds_of_nodes():
    model = wrap(lambda graph: graph.stores[0]["x"].sum() + 10 * graph.stores[1]["x"].sum())
    graph = HeteroGraph({"x": torch.ones(2)}, {"x": torch.ones(3)})
    assert model(graph).item() == 32
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(HeteroGraph({"x": torch.ones(3)}, {"x": torch.ones(3)}))


def test_without_the_package_nothing_happens(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    poptorch.registerGeometricCustomArgParsers()
    with pytest.raises(poptorch.Error, match=r"registerCustomArgParser\(Graph, ...\)"):
        wrap(lambda graph: graph.x)(Graph(x=torch.ones(2)))
