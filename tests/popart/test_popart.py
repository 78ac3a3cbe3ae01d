"""The enumerations of PopART that programs name."""

from __future__ import annotations

import enum

import popart
import poptorch
from poptorch.options import popart_keys, validate

BY_KEY = {
    "accumulateOuterFragmentSettings.schedule": popart.AccumulateOuterFragmentSchedule,
    "accumulationAndReplicationReductionType": popart.ReductionType,
    "autoRecomputation": popart.RecomputationType,
    "autodiffSettings.stitchStrategy": popart.AutodiffStitchStrategy,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": popart.GradientTensorTrackingMethod,
    "batchSerializationSettings.batchSchedule": popart.BatchSerializationBatchSchedule,
    "batchSerializationSettings.method": popart.BatchSerializationMethod,
    "batchSerializationSettings.transformContext": popart.BatchSerializationTransformContext,
    "meanAccumulationAndReplicationReductionStrategy": popart.MeanReductionStrategy,
    "mergeVarUpdate": popart.MergeVarUpdateType,
    "subgraphCopyingStrategy": popart.SubgraphCopyingStrategy,
    "syntheticDataMode": popart.SyntheticDataMode,
    "virtualGraphMode": popart.VirtualGraphMode,
}


def test_members_that_programs_use_have_their_numbers():
    assert int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized) == 3
    assert int(popart.SubgraphCopyingStrategy.JustInTime) == 1
    assert [int(getattr(popart.RecomputationType, n)) for n in ("Standard", "Pipeline", "RecomputeAll")] == [1, 3, 4]
    assert int(popart.SyntheticDataMode.RandomNormal) == 2
    assert int(popart.BatchSerializationBatchSchedule.Isomorphic) == 1
    assert int(popart.VirtualGraphMode.Manual) == 1


def test_each_setting_has_as_many_choices_as_its_enumeration():
    assert {key: len(kind) for key, kind in BY_KEY.items()} == popart_keys.CHOICES


def test_every_member_is_a_valid_setting():
    for key, kind in BY_KEY.items():
        if key == "meanAccumulationAndReplicationReductionStrategy":
            continue  # has a method of its own
        for member in kind:
            options = poptorch.Options().outputMode(poptorch.OutputMode.All)
            options._Popart.set(key, int(member))
            validate(options.toDict())


def test_everything_public_is_an_enumeration():
    assert all(issubclass(getattr(popart, name), enum.IntEnum) for name in popart.__all__)
