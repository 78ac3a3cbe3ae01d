"""module + optimiser + example batch → one `StepGraph`.

PyTorch's tracing internals appear in this folder alone. They take a second to import, so what traces is not imported
here but where a model is compiled: `poptorch.capture.record`. Worker processes of a data loader never need it.
"""

from poptorch.capture.call import Call, Captured
from poptorch.capture.context import (
    current_marks,
    is_capturing,
    is_capturing_training,
    leave_autocast,
    on_device,
    start_autocast,
)
from poptorch.capture.trained import LOSS_SCALING, SCALE_FACTOR, Holder, TrainedGroup, holders_of

__all__ = [
    "LOSS_SCALING",
    "SCALE_FACTOR",
    "Call",
    "Captured",
    "Holder",
    "TrainedGroup",
    "current_marks",
    "holders_of",
    "is_capturing",
    "is_capturing_training",
    "leave_autocast",
    "on_device",
    "start_autocast",
]
