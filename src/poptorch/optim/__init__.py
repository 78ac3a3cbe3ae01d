"""The optimisers, written as update rules that can be traced."""

from poptorch.optim.plan import GroupPlan, plan_groups
from poptorch.optim.rules import Rule

__all__ = ["GroupPlan", "Rule", "plan_groups"]
