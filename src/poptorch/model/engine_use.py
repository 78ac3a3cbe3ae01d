"""Which engine runs an executor, and how to wait for the faster one."""

from __future__ import annotations

from poptorch.model.locking import Lock, one_at_a_time
from poptorch.model.programs import Programs


class EngineUse:
    """The part of an executor that is about its engine."""

    _lock: Lock
    _programs: Programs

    @one_at_a_time
    def waitForNativeCode(self, timeout: float = 3600.0) -> bool:
        """With `Options.engine("tiered")`: wait until native code is there, and go on with it; tells whether it is.

        Gives up after `timeout` seconds. On the eager engine there is nothing to wait for.
        """
        current = self._programs.compiled()
        current.upgrade_if_ready(timeout)
        return current.engine == "inductor"

    @property
    def engineInUse(self) -> str:
        """Which engine runs the model now: `"eager"` or `"inductor"`; with `"tiered"` first the one, then the other."""
        return self._programs.compiled().engine
