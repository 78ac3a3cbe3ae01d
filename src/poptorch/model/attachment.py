"""How a model gets its device: how many IPUs, which, and when."""

from __future__ import annotations

from poptorch._logging import logger
from poptorch.enums import ConnectionType
from poptorch.errors import DeviceError, Error, explain
from poptorch.ipu import Device, acquire, model_is_asked_for, reserved_ipus
from poptorch.options import PlacementSettings


class Attachment:
    """The device of one model, or its absence.

    The IPU model is no device that others could take: a model that runs on it is attached without taking one.
    """

    def __init__(self, wanted: PlacementSettings, ipus: int) -> None:
        self._wanted = wanted
        self._ipus = ipus
        self._device: Device | None = None
        self.is_attached = False
        self.is_offline = wanted.connection is ConnectionType.Never  # compiled, but never run by this process

    @property
    def uses_model(self) -> bool:
        """Whether the model runs on the IPU model rather than on IPUs, which are emulated too but can run out."""
        asked = self._wanted.uses_ipu_model
        return model_is_asked_for() if asked is None else asked

    def before_capture(self) -> None:
        """Check what the options ask for."""
        if self.is_offline and self._wanted.uses_ipu_model:
            raise Error(
                explain(
                    "the IPU model cannot be an offline target.", fix="leave out useIpuModel(True), or use a device"
                )
            )
        self._count()

    def before_compilation(self, ipus: int) -> None:
        """The model turns out to need this many IPUs: take them, if the options want that before a long compilation."""
        self.resize(ipus)
        if self._wanted.connection is ConnectionType.Always and not self.is_attached:
            self.attach()

    def after_compilation(self) -> None:
        """Take the device if the model does not have it yet."""
        if not self.is_attached and not self.is_offline:
            self.attach()

    def attach(self) -> None:
        """Take the device."""
        self.check_online()
        if not self.uses_model:
            self._device = acquire(self._count(), self._wanted.first_ipu)
            logger.debug("Attached to %s", self._device)
        self.is_attached = True

    def detach(self) -> None:
        """Give the device back, if there is one."""
        if self._device is not None:
            self._device.release()
            self._device = None
            logger.debug("Detached from device")
        self.is_attached = False

    def check_online(self) -> None:
        """Raise if there will never be a device."""
        if self.is_offline:
            raise DeviceError(
                explain(
                    "Trying to run a model on an offline device.",
                    reason="the options say connectionType(ConnectionType.Never) or useOfflineIpuTarget()",
                    fix="compile with another connection type to run the model",
                )
            )

    def resize(self, ipus: int) -> None:
        """The model turns out to need this many IPUs; a device of another size is given back for one that fits."""
        before, self._ipus = self._ipus, ipus
        if self._device is not None and before != ipus:
            self.detach()
            self.attach()

    def _count(self) -> int:
        return reserved_ipus(self._ipus, rounds_up=self._wanted.rounds_up, insists=self._wanted.uses_ipu_model is False)
