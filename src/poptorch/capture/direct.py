"""Record an op at once, past the modes of PyTorch that functionalise it and tell its shapes.

On its way to the graph an op passes half a dozen modes, most of them in Python. What they make of an op that writes
nothing is the same whenever it comes past with arguments of the same kinds: one node for itself. An op that was seen to
become that is recorded directly from then on, unless an operand shows memory that something has written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

from poptorch.capture.private import (
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    active_modes,
    functional_like,
    functional_mode,
    functional_view,
    fx_traceback,
    get_proxy_mode,
    inner_of,
    times_written,
)
from poptorch.capture.proxies import node_of
from poptorch.capture.recorder import Recorder
from poptorch.capture.shapes import Key, Kind, Results, kind_of
from poptorch.ir import Note, annotation

Op = OpOverload
_OURS = 3  # the modes below `Watch`: for functional tensors, the recorder, and for fake tensors


@dataclass(frozen=True)
class Seen:
    """An op that might be recorded directly."""

    func: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inner_args: tuple[Any, ...]  # without the functional wrapping
    inner_kwargs: dict[str, Any]
    key: Key  # what its results depend on
    recorder: Recorder
    mode: FunctionalTensorMode
    length: int  # of the graph before it


class Direct:
    """What is known about the ops of one trace."""

    def __init__(self) -> None:
        self._results: dict[Key, Results | None] = {}  # of ops that become one node for themselves; None for others

    def see(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen | None:
        """An op that might be recorded directly; None if it is certain that the other modes have to see it."""
        if kind_of(func) is Kind.OTHER:
            return None
        recorder, mode = get_proxy_mode(), functional_mode()
        if type(recorder) is not Recorder or type(mode) is not FunctionalTensorMode or active_modes() != _OURS:
            return None
        inner_args = _unwrapped(args)
        inner_kwargs = _unwrapped(tuple(kwargs.values())) if kwargs else ()
        if inner_args is None or inner_kwargs is None:
            return None
        named = dict(zip(kwargs, inner_kwargs, strict=True))
        key = recorder.shapes.key(func, inner_args, named)
        if key is None:
            return None
        return Seen(func, args, kwargs, inner_args, named, key, recorder, mode, len(recorder.graph.nodes))

    def record(self, seen: Seen, note: Note) -> Any:
        """The result of an op, which becomes a node; `NotImplemented` if the other modes have to see it."""
        known = self._results.get(seen.key)
        if known is None:
            return NotImplemented
        custom = {**fx_traceback.get_current_meta().get("custom", {}), **annotation(note)}
        if known.is_view:
            with seen.recorder.annotating(custom):
                return functional_view(seen.mode, seen.func, seen.args, seen.kwargs)
        result = seen.recorder.add(seen.func, seen.inner_args, seen.inner_kwargs, known, custom)
        if known.container is None:
            return functional_like(seen.mode, result)
        return known.container([None if item is None else functional_like(seen.mode, item) for item in result])

    def learn(self, seen: Seen, result: Any) -> None:
        """Note what has become of an op that the other modes have seen."""
        if seen.key not in self._results:
            known = seen.recorder.shapes.results(seen.key)
            self._results[seen.key] = known if known is not None and _became_itself(seen, known, result) else None


def _became_itself(seen: Seen, known: Results, result: Any) -> bool:
    """Whether an op was recorded as one node, and its results are wrapped as always."""
    graph, recorder = seen.recorder.graph, seen.recorder
    added: list[fx.Node] = [*islice(reversed(graph.nodes), len(graph.nodes) - seen.length)][::-1]
    items = (result,) if known.container is None else result
    tensors = [item for item in items if item is not None]
    if type(items) is not (known.container or tuple) or not all(type(each) is FunctionalTensor for each in tensors):
        return False
    nodes = added if known.container is None else added[1:]
    if not added or added[0].target is not seen.func or len(nodes) != len(tensors):
        return False
    is_same_call = added[0].args == recorder.argument(seen.inner_args)
    is_same_call = is_same_call and added[0].kwargs == recorder.argument(seen.inner_kwargs)
    return is_same_call and [node_of(each) for each in tensors] == nodes


def _unwrapped(values: Sequence[Any]) -> Any:
    """The arguments of an op without functional wrapping; None if one has to be brought up to date before.

    A tensor may be behind if something has been written to its memory, perhaps through another one.
    """
    inner: list[Any] = []
    for value in values:
        if type(value) is FunctionalTensor:
            if times_written(value):
                return None
            inner.append(inner_of(value))
        elif isinstance(value, (list, tuple)):
            items = _unwrapped(value)
            if items is None:
                return None
            inner.append(items)
        elif isinstance(value, torch.Tensor):
            return None
        else:
            inner.append(value)
    return inner if type(values) is list else tuple(inner)
