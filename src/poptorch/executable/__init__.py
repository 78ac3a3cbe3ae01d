"""The finished program as plain data: programs, schedule, batch plan and the structure of its results."""

from poptorch.executable.checks import IndexCheck, first_wrong, out_of_range
from poptorch.executable.executable import AnchorPlan, Batching, Executable
from poptorch.executable.interface import Arguments, Interface
from poptorch.executable.program import Program
from poptorch.executable.restore import executable_from
from poptorch.executable.schedule import Commit, Exchange, Gather, Instruction, Meet, Reduce, Run, Schedule
from poptorch.executable.share import Handover, Home, Share
from poptorch.executable.state import GroupBinding, Grouping, Shard, StateBinding
from poptorch.executable.timeline import Kind, Part, Task, Timeline, part_name

__all__ = [
    "AnchorPlan",
    "Arguments",
    "Batching",
    "Commit",
    "Exchange",
    "Executable",
    "Gather",
    "GroupBinding",
    "Grouping",
    "Handover",
    "Home",
    "IndexCheck",
    "Instruction",
    "Interface",
    "Kind",
    "Meet",
    "Part",
    "Program",
    "Reduce",
    "Run",
    "Schedule",
    "Shard",
    "Share",
    "StateBinding",
    "Task",
    "Timeline",
    "executable_from",
    "first_wrong",
    "out_of_range",
    "part_name",
]
