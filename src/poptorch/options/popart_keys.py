"""The keys that `_Popart.set` knows, by the type of their value; most are recorded only, for programs that set them."""

from __future__ import annotations

BOOL = frozenset(
    [
        "aliasZeroCopy",
        "auto_round_num_ipus",
        "automaticLossScalingSettings.enabled",
        "batchSerializationSettings.concatOnExecutionPhaseChange",
        "batchSerializationSettings.concatOnPipelineStageChange",
        "batchSerializationSettings.concatOnVirtualGraphChange",
        "broadcast_buffers",
        "compileEngine",
        "constantWeights",
        "decomposeGradSum",
        "delayVarUpdates",
        "disableGradAccumulationTensorStreams",
        "disableOptimizerStateTensorStreams",
        "dotOpNames",
        "enableDistributedReplicatedGraphs",
        "enableEngineCaching",
        "enableExplicitIR",
        "enableExplicitMainLoops",
        "enableFloatingPointChecks",
        "enableFullyConnectedPass",
        "enableGradientAccumulation",
        "enableInplaceAmbiguityChecking",
        "enableLoadAndOffloadRNGState",
        "enableMergeExchange",
        "enableNonStableSoftmax",
        "enableOutlining",
        "enableOutliningCopyCostPruning",
        "enablePipelining",
        "enablePrefetchDatastreams",
        "enableReplicatedGraphs",
        "enableSerializedMatmuls",
        "enableStableNorm",
        "enableStochasticRounding",
        "enableSupportedDataTypeCasting",
        "ensureFp32LossScaleTensor",
        "explicitRecomputation",
        "exportPoplarComputationGraph",
        "exportPoplarVertexGraph",
        "groupHostSync",
        "groupNormStridedChannelGrouping",
        "instrumentWithHardwareCycleCounter",
        "opxAliasChecking",
        "opxModifyChecking",
        "rearrangeAnchorsOnHost",
        "rearrangeStreamsOnHost",
        "replicatedCollectivesSettings.mergeAllReduceCollectives",
        "replicatedCollectivesSettings.prepareScheduleForMergingCollectives",
        "scheduleNonWeightUpdateGradientConsumersEarly",
        "separateCallOpPdfs",
        "separate_backward_phase",
        "serial_phases_execution",
        "strictOpVersions",
        "useHostCopyOps",
        "use_model",
    ]
)

FLOAT = frozenset(
    [
        "automaticLossScalingSettings.binEdgeLocation",
        "automaticLossScalingSettings.thresholdUpperCountProportion",
        "outlineSequenceBreakCost",
        "outlineThreshold",
        "timeLimitScheduler",
    ]
)

# Keys whose value is a member of an enumeration of the graph compiler, and how many members that has.
CHOICES = {
    "accumulateOuterFragmentSettings.schedule": 4,
    "accumulationAndReplicationReductionType": 3,
    "autoRecomputation": 5,
    "autodiffSettings.stitchStrategy": 4,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": 3,
    "batchSerializationSettings.batchSchedule": 4,
    "batchSerializationSettings.method": 3,
    "batchSerializationSettings.transformContext": 2,
    "meanAccumulationAndReplicationReductionStrategy": 2,
    "mergeVarUpdate": 4,
    "subgraphCopyingStrategy": 2,
    "syntheticDataMode": 4,
    "virtualGraphMode": 4,
}

INT = CHOICES.keys() | frozenset(
    [
        "accumulationFactor",
        "automaticLossScalingSettings.updatePeriod",
        "batchSerializationSettings.factor",
        "compilationProgressTotal",
        "defaultBufferingDepth",
        "defaultPrefetchBufferingDepth",
        "execution_mode",
        "executionPhaseSettings.phases",
        "executionPhaseSettings.stages",
        "finalDotOp",
        "firstDotOp",
        "globalReplicaOffset",
        "globalReplicationFactor",
        "looseThresholdAtPeak",
        "mergeVarUpdateMemThreshold",
        "numIOTiles",
        "patterns_level",
        "swapLimitScheduler",
        "tensors_liveness",
        "transitiveClosureOptimizationThreshold",
    ]
)

STRING = frozenset(
    [
        "cachePath",
        "customCodeletCompileFlags",
        "kahnTieBreaker",
        "logDir",
        "log_dir",
        "model_name",
        "partialsTypeMatMuls",
        "saveInitializersToFile",
        "serializedPoprithmsShiftGraphsDir",
    ]
)

SEQUENCE = frozenset(
    [
        "accumulateOuterFragmentSettings.excludedVirtualGraphs",
        "customCodelets",
        "dotChecks",
        "hardwareInstrumentations",
        "updatableNamedBuffers",
    ]
)

MAP = frozenset(
    ["convolutionOptions", "engineOptions", "gclOptions", "lstmOptions", "matmulOptions", "patterns", "reportOptions"]
)
