"""Fixtures that every test can use."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
import torch

pytest_plugins = ["golden_texts"]


def pytest_configure(config: pytest.Config) -> None:
    ipus_of_our_own = tempfile.TemporaryDirectory(prefix="poptorch-ipus-")
    config.add_cleanup(ipus_of_our_own.cleanup)
    os.environ["POPTORCH_IPU_LOCKS"] = ipus_of_our_own.name
    own_state = tempfile.TemporaryDirectory(prefix="poptorch-state-")
    config.add_cleanup(own_state.cleanup)
    os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"] = own_state.name  # never the folders of the user
    if "PYTEST_XDIST_WORKER" not in os.environ:  # headers are compiled once for all processes of a run
        machine = tempfile.TemporaryDirectory(prefix="poptorch-machine-")
        config.add_cleanup(machine.cleanup)
        os.environ["POPTORCH_MACHINE_DIR"] = machine.name
    os.environ["POPTORCH_CACHE"] = "0"  # tests compile what they are about; those of the cache switch it on
    os.environ["POPTORCH_ENGINE"] = "eager"  # unless a test asks for another: compiling takes seconds
    os.environ["POPTORCH_FALLBACK"] = "0"  # the eager engine must not hide what the inductor engine cannot do
    torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way


@pytest.fixture(scope="session")
def programs():
    """Where to start programs that use poptorch."""
    from programs import Programs

    found = Programs()
    yield found
    found.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="everything, and faults and interrupts many times")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that no core waits for another at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        if item.get_closest_marker("only_long") and not item.config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes long; runs with --long"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`engine` is "eager"; a test marked `inductor` runs a second time, on "inductor"."""
    if "engine" not in metafunc.fixturenames:
        return
    engines: list[object] = ["eager"]
    if metafunc.definition.get_closest_marker("inductor"):
        no_compiler = shutil.which("g++") is None and shutil.which("clang++") is None
        engines.append(pytest.param("inductor", marks=pytest.mark.skipif(no_compiler, reason="needs a C++ compiler")))
    metafunc.parametrize("engine", engines)
