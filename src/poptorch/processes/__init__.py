"""The processes of a program: which one this is, how they find each other, what they exchange, and who failed.

Nothing here knows what a model is. Transport and rendezvous are those of `torch.distributed`.
"""

from poptorch.processes.group import Group, connect, together
from poptorch.processes.place import Place, find_place, is_meeting_known
from poptorch.processes.team import Team

__all__ = ["Group", "Place", "Team", "connect", "find_place", "is_meeting_known", "together"]
