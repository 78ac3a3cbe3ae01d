"""The public enumerations: names and numbers are the contract."""

from __future__ import annotations

from enum import Enum, IntEnum

import pytest

import poptorch

VALUES = {
    "OutputMode": {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4},
    "AnchorMode": {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4},
    "ReductionType": {"Sum": 0, "Mean": 1, "NoReduction": 2},
    "MeanReductionStrategy": {"Running": 0, "Post": 1, "PostAndLoss": 2},
    "ConnectionType": {"Always": 0, "OnDemand": 1, "Never": 2},
    "SyncPattern": {"Full": 0, "SinglePipeline": 1, "ReplicaAndLadder": 2},
    "CommGroupType": {"All": 0, "Consecutive": 1, "Orthogonal": 2, "NoGrouping": 3},
    "VariableRetrievalMode": {"OnePerGroup": 0, "AllReplicas": 2},
    "AutoStage": {"SameAsIpu": 0, "AutoIncrement": 1},
    "Liveness": {
        "AlwaysLive": 0,
        "OffChipAfterFwd": 1,
        "OffChipAfterFwdNoOverlap": 2,
        "OffChipAfterEachPhase": 3,
    },
    "HalfFloatCastingBehavior": {"FloatDowncastToHalf": 0, "HalfUpcastToFloat": 1, "Default": 2},
    "DataLoaderMode": {"Sync": 0, "Async": 1, "AsyncRebatched": 2},
    "SharingStrategy": {"SharedMemory": 0, "FileSystem": 1, "Fork": 2, "ForkServer": 3},
    "MultiConvPlanType": {"Parallel": 0, "Serial": 1},
    "MultiConvPartialsType": {"Float": 0, "Half": 1},
    "OverlapMode": {
        "NoOverlap": "no_overlap",
        "OverlapAccumulationLoop": "overlap_accumulation_loop",
        "OverlapDeviceIterationLoop": "overlap_device_iteration_loop",
    },
    "MatMulSerializationMode": {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
}


@pytest.mark.parametrize("name", VALUES)
def test_members_and_values(name):
    kind = getattr(poptorch, name)
    assert {item.name: item.value for item in kind} == VALUES[name]
    assert getattr(poptorch.enums, name) is kind


@pytest.mark.parametrize("name", VALUES)
def test_enumerations_with_numbers_can_be_made_from_them(name):
    kind = getattr(poptorch, name)
    is_text = name in ("OverlapMode", "MatMulSerializationMode")
    assert issubclass(kind, Enum if is_text else IntEnum)
    for member, value in VALUES[name].items():
        assert kind(value) is kind[member]
