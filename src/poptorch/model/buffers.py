"""What options say about buffers, checked against the model they are used with."""

from __future__ import annotations

from torch import nn

from poptorch.errors import Error, explain, nearest
from poptorch.executable import Executable
from poptorch.ir import Role
from poptorch.options import Settings


def updatable_buffers(settings: Settings, module: nn.Module) -> tuple[str, ...] | None:
    """The buffers that `copyNamedBuffersToDevice()` copies, which must exist; None if the option is not set."""
    names = settings.engine.updatable_buffers
    known = dict(module.named_buffers())
    for name in names or ():
        if name not in known:
            raise Error(f"updatableNamedBuffers names {name!r}, but the model has no such buffer{nearest(name, known)}")
    return names


def check_broadcast(settings: Settings, module: nn.Module, executable: Executable) -> None:
    """Raise if replicas would change a buffer that the options say they share.

    Statistics of batch normalisation are exempt: every replica has its own, and the module gets those of the first.
    """
    if not settings.placement.broadcasts_buffers or executable.batching.replicas == 1:
        return
    written = executable.written_by_steps
    for spec in [spec for spec in executable.state if spec.role is Role.BUFFER and spec.name in written]:
        if not hasattr(module.get_submodule(spec.name.rpartition(".")[0]), "track_running_stats"):
            raise Error(
                explain(
                    f"forward changes the buffer {spec.name}, and each of the {executable.batching.replicas} replicas "
                    "would change it differently.",
                    fix="call Options.broadcastBuffers(False) to give each replica a buffer of its own",
                )
            )
