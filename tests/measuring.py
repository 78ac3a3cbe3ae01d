"""What calls cost."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile


def peak_nbytes(call):
    """The most memory that tensors take at a time during a call, beside what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        call()
    events = [event for event in observed.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
