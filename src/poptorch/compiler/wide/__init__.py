"""Micro-batches of an update side by side: one wide program in place of many runs of a narrow one."""

from poptorch.compiler.wide.collectives import exchanges
from poptorch.compiler.wide.groups import NO_GROUPS, Groups
from poptorch.compiler.wide.norms import normalises_images
from poptorch.compiler.wide.values import CannotWiden
from poptorch.compiler.wide.widen import Widened, widen

__all__ = ["NO_GROUPS", "CannotWiden", "Groups", "Widened", "exchanges", "normalises_images", "widen"]
