"""The private names of PyTorch that this folder uses; `tests/processes/test_private.py` knows when they change."""

from torch.distributed.distributed_c10d import _get_default_store as default_store

__all__ = ["default_store"]
