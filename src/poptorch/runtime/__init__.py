"""The session: runs the schedule of an executable on bound state, and gives outputs and a `RunTrace`."""

from poptorch.runtime.random import RandomState, RandomStreams
from poptorch.runtime.session import Seat, Session
from poptorch.runtime.trace import NO_LATENCY, Latency, RunTrace, latency

__all__ = [
    "NO_LATENCY",
    "Latency",
    "RandomState",
    "RandomStreams",
    "RunTrace",
    "Seat",
    "Session",
    "latency",
]
