"""What an IPU is, and which of them this machine emulates."""

from poptorch.ipu.devices import MOST_PER_MODEL, Device, acquire, reserved_ipus
from poptorch.ipu.system import (
    announce,
    cycles_per_second,
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    model_is_asked_for,
    number_of_ipus,
)

__all__ = [
    "Device",
    "MOST_PER_MODEL",
    "acquire",
    "announce",
    "cycles_per_second",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "model_is_asked_for",
    "number_of_ipus",
    "reserved_ipus",
]
