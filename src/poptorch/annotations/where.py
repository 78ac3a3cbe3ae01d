"""Where the code is running."""

from __future__ import annotations

from poptorch.capture import is_capturing


def isRunningOnIpu() -> bool:
    """True while `forward` is being compiled for the device, False when the same module runs on the host.

    >>> import poptorch
    >>> poptorch.isRunningOnIpu()
    False
    """
    return is_capturing()
