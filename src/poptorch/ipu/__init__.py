"""What an IPU is, and which of them this machine emulates."""

from poptorch.ipu.system import announce, ipuHardwareIsAvailable, ipuHardwareVersion, number_of_ipus

__all__ = ["announce", "ipuHardwareIsAvailable", "ipuHardwareVersion", "number_of_ipus"]
