"""The accelerator by itself."""

from __future__ import annotations

import torch

from poptorch.lightning import IPUAccelerator


def test_what_it_says_about_itself():
    accelerator = IPUAccelerator()
    assert accelerator.name() == "ipu"
    assert accelerator.auto_device_count() == 4
    assert accelerator.get_device_stats(torch.device("ipu", 0)) == {}
    assert [device.index for device in accelerator.get_parallel_devices(3)] == [0, 1, 2]


def test_it_is_available_when_models_can_run(monkeypatch):
    assert IPUAccelerator.is_available()
    monkeypatch.setenv("POPTORCH_NUM_IPUS", "0")
    assert not IPUAccelerator.is_available()
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert IPUAccelerator.is_available()
