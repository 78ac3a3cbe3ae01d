"""What has been recorded so far about ops with a hint."""

from __future__ import annotations

from torch import fx

from poptorch.capture.private import get_proxy_mode
from poptorch.capture.recorder import Recorder
from poptorch.ir import Hint, hint_of


def recorded_with(hint: Hint) -> list[fx.Node]:
    """The ops of the capture that is going on about which the user said this, in the order in which they ran."""
    recorder = get_proxy_mode()
    assert isinstance(recorder, Recorder), "only a capture records ops"
    kind, value = hint
    return [node for node in recorder.graph.nodes if hint_of(node, kind) == value]
