"""Fixtures that every test can use."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
import torch

pytest_plugins = ["golden_texts"]


def pytest_configure() -> None:
    os.environ["POPTORCH_IPU_LOCKS"] = tempfile.mkdtemp(prefix="poptorch-ipus-")  # IPUs of our own
    torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="repeat the tests of failing data loaders 100 times, not 5")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`engine` is "eager"; a test marked `inductor` runs a second time, on "inductor"."""
    if "engine" not in metafunc.fixturenames:
        return
    engines: list[object] = ["eager"]
    if metafunc.definition.get_closest_marker("inductor"):
        no_compiler = shutil.which("g++") is None and shutil.which("clang++") is None
        engines.append(pytest.param("inductor", marks=pytest.mark.skipif(no_compiler, reason="needs a C++ compiler")))
    metafunc.parametrize("engine", engines)
