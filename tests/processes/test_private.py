"""The private names of torch that `poptorch.processes` uses."""

from __future__ import annotations

import inspect

from poptorch.processes.private import default_store


def test_the_store_of_the_default_group_is_asked_for_without_arguments():
    assert not inspect.signature(default_store).parameters
