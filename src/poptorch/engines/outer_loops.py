"""Native code in which loops that share nothing but their outermost level are kept apart.

Inductor joins such loops, but fails to generate code for them if one changes in place what another has computed.
"""

from __future__ import annotations

from typing import Any

from poptorch.engines.private import CustomSchedulerPass, OuterLoopFusedSchedulerNode, get_hash_for_files


class SplitOuterLoops(CustomSchedulerPass):
    """Takes apart what Inductor's scheduler has joined at the outermost level only."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        parts: list[Any] = []
        for node in nodes:
            if not isinstance(node, OuterLoopFusedSchedulerNode):
                parts.append(node)
                continue
            for part in node.get_outer_nodes():
                parts.append(part)
                node.scheduler.name_to_fused_node.update({inner.get_name(): part for inner in part.get_nodes()})
        return parts

    def uuid(self) -> Any:
        """What tells cached code that was generated so from other code."""
        return get_hash_for_files((__file__,))
