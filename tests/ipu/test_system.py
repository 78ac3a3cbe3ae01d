"""The emulated IPUs that this machine has."""

from __future__ import annotations

import logging

import pytest
import torch

import poptorch
import poptorch.poptorch_core
from poptorch.ipu import system
from poptorch.model import executor


def test_emulated_ipus_count_as_hardware():
    assert poptorch.ipuHardwareIsAvailable()
    assert poptorch.ipuHardwareIsAvailable(64)
    assert not poptorch.ipuHardwareIsAvailable(65)
    assert poptorch.ipuHardwareVersion() == 2


def test_the_number_of_ipus_can_be_chosen(monkeypatch):
    monkeypatch.setenv("POPTORCH_NUM_IPUS", "4")
    assert poptorch.ipuHardwareIsAvailable(4)
    assert not poptorch.ipuHardwareIsAvailable(8)


@pytest.mark.parametrize(
    ("variable", "value"), [("POPTORCH_NUM_IPUS", "0"), ("POPTORCH_IPU_MODEL", "1"), ("POPTORCH_SMALL_IPU_MODEL", "1")]
)
def test_without_ipus_there_is_no_version(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert not poptorch.ipuHardwareIsAvailable()
    assert not poptorch.ipuHardwareIsAvailable(2)
    with pytest.raises(AssertionError, match="POPTORCH_NUM_IPUS"):
        poptorch.ipuHardwareVersion()


@pytest.mark.parametrize(("name", "number"), [("ipu1", 1), ("ipu2", 2), ("ipu21", 21)])
def test_the_version_can_be_chosen(name, number, monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", name)
    assert poptorch.ipuHardwareVersion() == number


@pytest.mark.parametrize(
    ("variable", "value"),
    [("POPTORCH_IPU_MODEL_VERSION", "ipu3"), ("POPTORCH_NUM_IPUS", "many"), ("POPTORCH_NUM_IPUS", "-1")],
)
def test_bad_variables_are_named_with_their_value(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(poptorch.Error, match=f"{variable}.*{value}"):
        poptorch.ipuHardwareVersion()


def test_the_log_says_once_in_a_process_that_ipus_are_emulated(caplog, monkeypatch):
    monkeypatch.setattr(executor, "announce", system._Banner())
    options = poptorch.Options().engine("eager")
    for level in ("WARNING", "INFO", "INFO"):
        with caplog.at_level(level, logger="poptorch::python"):
            poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    assert caplog.text.count("IPUs are emulated") == 1


@pytest.mark.parametrize(("use", "word"), [(True, "Enabled"), (False, "Disabled")])
def test_an_explicit_choice_of_the_model_is_logged(use, word, caplog):
    options = poptorch.Options().useIpuModel(use).outputMode(poptorch.OutputMode.All)
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        poptorch.poptorch_core._validateOptions(options.toDict())
    assert f"From the user configuration: Ipu model: {word}" in caplog.text


def test_nothing_is_logged_about_the_model_if_nothing_was_chosen(caplog):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        poptorch.poptorch_core._validateOptions(options.toDict())
    assert "Ipu model" not in caplog.text
