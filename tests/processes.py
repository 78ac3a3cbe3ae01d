"""Which processes run, according to /proc, and what they leave in shared memory."""

from __future__ import annotations

from pathlib import Path


def members(*, session=None, group=None):
    """The commands of the live processes of a session or a group, by process id; zombies only wait to be counted."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended meanwhile
            continue
        state, _, its_group, its_session = stat[stat.rindex(")") + 2 :].split()[:4]
        if state != "Z" and (session in (None, int(its_session)) and group in (None, int(its_group))):
            found[int(entry.name)] = command
    return found


def segments(pids):
    """The names in shared memory that these processes gave to batches that they sent."""
    return [path.name for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
