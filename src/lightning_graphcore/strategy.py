"""`IPUStrategy`, which lives in `poptorch.lightning`."""

from poptorch.lightning import IPUStrategy

__all__ = ["IPUStrategy"]
