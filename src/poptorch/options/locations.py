"""Options about where tensors are stored: in the memory of the IPUs or outside."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from poptorch.errors import OptionError
from poptorch.options.checks import boolean, integer, not_negative
from poptorch.options.group import OptionGroup, Stored, option


class TensorLocationSettings(OptionGroup):
    """Where tensors of one kind are stored.

    >>> import poptorch
    >>> off_chip = poptorch.TensorLocationSettings().useOnChipStorage(False)
    >>> options = poptorch.Options()
    >>> options.TensorLocations.setOptimizerLocation(off_chip).location_optimizer
    {'onChip': 0}
    """

    @option(minElementsForOffChip=Stored(int, least=0))
    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Keep tensors with fewer elements on the IPU in any case."""
        return self._store(minElementsForOffChip=not_negative("minElementsForOffChip", min_elements))

    @option(minElementsForReplicatedTensorSharding=Stored(int, least=0))
    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Share tensors out over the replicas only if they have this many elements."""
        name = "minElementsForReplicatedTensorSharding"
        return self._store(minElementsForReplicatedTensorSharding=not_negative(name, min_elements))

    @option(onChip=Stored(int))
    def useOnChipStorage(self, use: bool | None = True) -> Self:
        """Store on the IPU (True), outside (False), or leave the choice open (None)."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._store(onChip=int(boolean("useOnChipStorage", use)))

    @option(useReplicatedTensorSharding=Stored(int))
    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Let each replica keep only its share of a tensor."""
        return self._store(useReplicatedTensorSharding=int(boolean("useReplicatedTensorSharding", use)))

    @option(useIOTilesToLoad=Stored(int))
    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Load through the tiles reserved by `numIOTiles`."""
        return self._store(useIOTilesToLoad=int(boolean("useIOTilesToLoad", use)))

    @option(useIOTilesToStore=Stored(int))
    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Store through the tiles reserved by `numIOTiles`."""
        return self._store(useIOTilesToStore=int(boolean("useIOTilesToStore", use)))


class TensorLocationOptions(OptionGroup):
    """Where activations, weights, optimiser state and gradient accumulators are stored."""

    @option(numIOTiles=Stored(int))
    def numIOTiles(self, num_tiles: int) -> Self:
        """Reserve this many tiles of each IPU for transfers: an even number between 32 and 192."""
        tiles = integer("numIOTiles", num_tiles)
        if tiles % 2 or not 32 <= tiles <= 192:
            raise OptionError(f"numIOTiles takes an even number between 32 and 192, not {tiles}")
        return self._store(numIOTiles=tiles)

    @option(location_activation=Stored(dict))
    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Where intermediate results are stored."""
        return self._store(location_activation=_plain("setActivationLocation", location))

    @option(location_weight=Stored(dict))
    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Where weights are stored."""
        return self._store(location_weight=_plain("setWeightLocation", location))

    @option(location_optimizer=Stored(dict))
    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Where the state of the optimiser is stored."""
        return self._store(location_optimizer=_plain("setOptimizerLocation", location))

    @option(location_accumulator=Stored(dict))
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Where accumulated gradients are stored."""
        return self._store(location_accumulator=_plain("setAccumulatorLocation", location))


def _plain(name: str, location: object) -> dict[str, Any]:
    """The settings as they are now; later changes of the object do not count."""
    if not isinstance(location, TensorLocationSettings):
        raise OptionError(f"{name} takes a poptorch.TensorLocationSettings, not {location!r}")
    return location.toDict()
