"""The emulated IPUs of this machine: how many there are, and of which version.

They count as hardware, so that programs that insist on hardware start.
"""

from __future__ import annotations

import logging

from poptorch import environment
from poptorch._logging import logger
from poptorch.errors import DeviceError, VariableError, nearest

_VERSIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}
_CYCLES_PER_SECOND = {1: 1.6e9, 2: 1.325e9, 21: 1.85e9}


def number_of_ipus() -> int:
    """How many IPUs this machine has, all of them emulated."""
    count = environment.NUM_IPUS.integer()
    if count < 0:
        raise VariableError(f"environment variable {environment.NUM_IPUS.name} is {count}, but must not be negative")
    return count


def ipu_version() -> int:
    """The version of the emulated IPUs: 1, 2 or 21."""
    name = environment.IPU_MODEL_VERSION.read()
    if name not in _VERSIONS:
        variable = environment.IPU_MODEL_VERSION.name
        raise VariableError(f"environment variable {variable} is {name!r}, which is no IPU{nearest(name, _VERSIONS)}")
    return _VERSIONS[name]


def cycles_per_second() -> float:
    """The clock of the emulated IPUs."""
    return _CYCLES_PER_SECOND[ipu_version()]


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there is a device of this many IPUs; emulated ones count, unless `POPTORCH_IPU_MODEL` is set.

    >>> import poptorch
    >>> poptorch.ipuHardwareIsAvailable()
    True
    """
    return not model_is_asked_for() and 1 <= num_ipus <= number_of_ipus()


def ipuHardwareVersion() -> int:
    """The version of the IPUs: 1, 2 or 21.

    >>> import poptorch
    >>> poptorch.ipuHardwareVersion()
    2
    """
    if not ipuHardwareIsAvailable():
        raise DeviceError(
            f"there is no IPU hardware: {environment.NUM_IPUS.name} is 0, or {environment.IPU_MODEL.name} is set"
        )
    return ipu_version()


def model_is_asked_for() -> bool:
    """Whether the environment asks for the IPU model, of which there are as many as anyone wants."""
    return environment.IPU_MODEL.flag() or environment.SMALL_IPU_MODEL.flag()


class _Banner:
    """A line that is shown once in a process, as soon as lines of its level are."""

    def __init__(self) -> None:
        self._was_shown = False

    def __call__(self) -> None:
        """Say that the IPUs are emulated."""
        if self._was_shown or not logger.isEnabledFor(logging.INFO):
            return
        self._was_shown = True
        logger.info(
            "IPUs are emulated: models run on this machine's own processor, as %d IPUs of version %d would run them",
            number_of_ipus(),
            ipu_version(),
        )


announce = _Banner()
