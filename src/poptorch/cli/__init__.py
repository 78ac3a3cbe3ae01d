"""The command `poptorch`: what is in the cache, what this machine is, and whether it has everything that is needed."""

from poptorch.cli.commands import main

__all__ = ["main"]
