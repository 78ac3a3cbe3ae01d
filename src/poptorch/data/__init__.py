"""`DataLoader` and its asynchronous worker."""

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
