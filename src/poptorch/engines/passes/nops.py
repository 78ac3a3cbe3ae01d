"""Leave out what is in a program only to be seen in it.

In:    a StepGraph.
Out:   the same graph without `poptorch.nop` and hints.
Keeps: every value; results that have memory of their own still have it.
"""

from __future__ import annotations

import torch

from poptorch.engines.host import Host
from poptorch.ir import StepGraph, without_identities


def remove_nops(graph: StepGraph, host: Host) -> StepGraph:
    """Pass values on without copying them."""
    return without_identities(graph, {torch.ops.poptorch.nop.default, torch.ops.poptorch.hint.default})
