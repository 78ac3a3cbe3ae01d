"""The names of the package in which Lightning's IPU support once lived; they are those of `poptorch.lightning`."""

from poptorch.lightning import IPUAccelerator, IPUPrecision, IPUStrategy

__all__ = ["IPUAccelerator", "IPUPrecision", "IPUStrategy"]
