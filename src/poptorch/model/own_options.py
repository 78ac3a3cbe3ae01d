"""The options of one executor, made from those of its user."""

from __future__ import annotations

from poptorch.enums import OutputMode
from poptorch.errors import Error, explain
from poptorch.options import Options


def own_options(options: Options | None, *, training: bool) -> Options:
    """Freeze the caller's options and give a copy for one executor, with the output mode resolved."""
    if options is not None and not isinstance(options, Options):
        raise Error(f"options must be a poptorch.Options, not {type(options).__name__}.")
    if options is None:
        options = Options()
    count = options.Training.gradient_accumulation
    if count != 1 and not training:
        raise Error(
            explain(
                f"gradientAccumulation is {count}, but an inference model accumulates no gradients.",
                fix="You must set poptorch.Options().Training.gradientAccumulation to 1; "
                "deviceIterations runs several batches per call",
            )
        )
    options._freeze()
    return options._resolved(OutputMode.Final if training else OutputMode.All)
