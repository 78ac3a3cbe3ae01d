"""`IPUAccelerator`: the emulated IPUs as Lightning sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import poptorch
from poptorch import environment
from poptorch.lightning.packages import Lightning

if TYPE_CHECKING:
    from lightning.pytorch.accelerators import Accelerator as _Base
else:
    _Base = object

NAME = "ipu"
SMALLEST_SYSTEM = 4  # IPUs


class AcceleratorBehaviour(_Base):
    """What `IPUAccelerator` adds to the accelerator of either package."""

    package: Lightning

    def setup_device(self, device: torch.device) -> None:
        """Nothing: executors take their IPUs when they compile."""

    def teardown(self) -> None:
        """Nothing: executors give their IPUs back."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Emulated IPUs have no counters."""
        return {}

    @classmethod
    def parse_devices(cls, devices: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of replicas that an argument asks for."""
        if isinstance(devices, str) and devices.lstrip("-").isdigit():
            devices = int(devices)
        if devices == -1:
            return SMALLEST_SYSTEM
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise cls.package.MisconfigurationException(
                f"`Trainer(accelerator='ipu', devices={devices!r})`: IPUs are chosen by a single number, how many, "
                "not by their indices."
            )
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:  # pyright: ignore
        """One device for each replica."""
        return [torch.device("ipu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """The IPUs of the smallest system."""
        return SMALLEST_SYSTEM

    @staticmethod
    def is_available() -> bool:
        """Whether models can run: there are emulated IPUs, or the environment asks for the IPU model."""
        is_model = environment.IPU_MODEL.flag() or environment.SMALL_IPU_MODEL.flag()
        return is_model or poptorch.ipuHardwareIsAvailable()

    @staticmethod
    def name() -> str:
        """The name for `Trainer(accelerator=...)`."""
        return NAME

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Make the name known."""
        accelerator_registry.register(NAME, cls, description="emulated IPUs of poptorch", override=True)
