"""Settings are what options mean for one kind of model, and nothing that is done to options later changes them."""

from __future__ import annotations

import dataclasses

import pytest

import poptorch
from poptorch.enums import OutputMode
from poptorch.options import StagePlan, resolve


@pytest.mark.parametrize(("training", "mode"), [(True, OutputMode.Final), (False, OutputMode.All)])
def test_the_default_output_mode_becomes_the_real_one(training, mode):
    assert resolve(poptorch.Options(), training=training).batching.output_mode is mode


def test_inference_accumulates_nothing():
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    assert resolve(options, training=True).batching.gradient_accumulation == 4
    assert resolve(options, training=False).batching.gradient_accumulation == 1


def test_what_happens_to_options_later_does_not_matter():
    options = poptorch.Options().deviceIterations(2)
    options.setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
    options.anchorTensor("loss", "Loss:0")
    settings = resolve(options, training=True)
    options.deviceIterations(3).anchorTensor("more", "More:0")
    options._execution_strategy.stage("a").ipu(1)
    assert settings.batching.device_iterations == 2
    assert list(settings.report.anchors) == ["loss"]
    assert settings.placement.strategy.stages["a"] == StagePlan(0, 0, None)


def test_settings_cannot_be_changed():
    settings = resolve(poptorch.Options(), training=True)
    for part in (settings, settings.training, settings.precision, settings.placement, settings.engine):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.is_training = False


def test_equal_options_resolve_to_equal_settings():
    def settings(iterations):
        resolved = resolve(poptorch.Options().deviceIterations(iterations), training=False)
        return dataclasses.replace(resolved, placement=dataclasses.replace(resolved.placement, strategy=None))

    assert settings(2) == settings(2) != settings(3)
