"""Trace points: invisible without a profiler, named regions with one."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

import poptorch


class Loader:
    def load(self, rows):
        return rows * 2


def test_instrumenting_changes_neither_object_nor_result():
    loader = Loader()
    assert poptorch.profiling.Channel("a").instrument(loader, "load", "no_such_method") is loader
    assert loader.load(3) == 6


def test_regions_show_up_in_a_profile():
    channel = poptorch.profiling.Channel("a")
    loader = channel.instrument(Loader(), "load")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loader.load(1)
        with channel.tracepoint("b"):
            pass
    names = {event.name for event in recorded.events()}
    assert {"a.load", "a.b"} <= names
