"""`IPUAccelerator`, which lives in `poptorch.lightning`."""

from poptorch.lightning import IPUAccelerator

__all__ = ["IPUAccelerator"]
