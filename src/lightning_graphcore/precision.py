"""`IPUPrecision`, which lives in `poptorch.lightning`."""

from poptorch.lightning import IPUPrecision

__all__ = ["IPUPrecision"]
