"""Say which parts of a model belong together: blocks, which a strategy spreads over IPUs.

All of these act while a model is compiled. When the same module runs on the host they do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from poptorch._logging import warn_once
from poptorch.capture import current_placer
from poptorch.errors import Error, OptionError, explain

F = TypeVar("F", bound=Callable[..., Any])
IpuId = int | str | None


def _begin(user_id: object, ipu_id: IpuId, *, scoped: bool = False) -> None:
    """Begin a block in the capture that is going on, if there is one; a scoped one has an end."""
    placer = current_placer()
    if placer is not None:
        placer.begin(placer.next_id() if user_id is None else str(user_id), _ipu(ipu_id), scoped=scoped)


def _end() -> None:
    """End a scoped block."""
    placer = current_placer()
    if placer is not None:
        placer.end()


def _ipu(ipu_id: IpuId) -> int | None:
    if ipu_id is None:
        return None
    try:
        ipu = int(ipu_id)
    except (TypeError, ValueError):
        ipu = -1
    if ipu < 0 or isinstance(ipu_id, (bool, float)):
        raise OptionError(f"ipu_id is the number of an IPU, counted from 0, not {ipu_id!r}")
    return ipu


class Block(nn.Module):
    """A part of `forward` that belongs together: `with poptorch.Block("encoder", ipu_id=0): ...`.

    After the end of a block no operation may follow outside of blocks. Blocks of the same id are one block.
    """

    def __init__(self, user_id: str | None = None, ipu_id: IpuId = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = user_id, ipu_id

    def __enter__(self) -> None:
        _begin(self._user_id, self._ipu_id, scoped=True)

    def __exit__(self, *exception: Any) -> None:
        _end()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: IpuId = None) -> None:
        """Begin a block that lasts until the next one begins."""
        _begin(user_id, ipu_id)

    @staticmethod
    def useAutoId() -> None:
        """Number the blocks that have no id from 0 on; to be called where `forward` starts."""
        placer = current_placer()
        if placer is not None:
            placer.count_again()


def BlockFunction(user_id: str | None = None, ipu_id: IpuId = None) -> Callable[[F], F]:
    """Decorate a function or method that is a block: `@poptorch.BlockFunction("head", ipu_id=1)`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return cast("F", run)

    return decorate


class _BlockHook:
    """What begins a block before a module runs; a module is copied and pickled with it."""

    def __init__(self, user_id: object, ipu_id: IpuId) -> None:
        self._user_id, self._ipu_id = user_id, ipu_id
        self._drawn: str | None = None  # the automatic id, once there is one

    def __call__(self, module: nn.Module, args: Any) -> None:
        placer = current_placer()
        if placer is None:
            return
        if self._user_id is None and self._drawn is None:
            self._drawn = placer.next_id()
        _begin(self._drawn if self._user_id is None else self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class _BlockCall(nn.Module):
    """A function that begins a block whenever it is called."""

    def __init__(self, function: Callable[..., Any], user_id: object, ipu_id: IpuId) -> None:
        super().__init__()
        self._function, self._user_id, self._ipu_id = function, user_id, ipu_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _begin(self._user_id, self._ipu_id)
        return self._function(*args, **kwargs)


def BeginBlock(layer_to_call: Any, user_id: object = None, ipu_id: IpuId = None) -> Any:
    """Let a block begin whenever this layer is called; it lasts until the next one begins.

    Gives the layer itself, which stays what it is. A list of layers is annotated at its first; a function is wrapped.
    """
    if isinstance(layer_to_call, (nn.ModuleList, list, tuple)) and len(layer_to_call):
        BeginBlock(layer_to_call[0], user_id, ipu_id)
        return layer_to_call
    if isinstance(layer_to_call, nn.Module):
        if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
            raise Error(
                explain(
                    f"this {type(layer_to_call).__name__} module has already been assigned to a block.",
                    fix="call poptorch.removeBlocks(model) first to annotate it again",
                )
            )
        layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
        return layer_to_call
    if callable(layer_to_call) and not isinstance(layer_to_call, type):
        return _BlockCall(layer_to_call, user_id, ipu_id)
    raise Error(
        explain(
            f"BeginBlock takes a module, a list of them or a function, not {layer_to_call!r}.",
            fix="poptorch.BeginBlock(model.layer, 'name', ipu_id=1)",
        )
    )


def removeBlocks(module: nn.Module) -> None:
    """Take all `BeginBlock` annotations from a module and everything inside."""
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"removeBlocks takes a module, not {module!r}")
    for layer in module.modules():
        hooks = layer._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _BlockHook)]:
            del hooks[key]


class IPU(nn.Module):
    """The oldest annotation: `IPU(1, layer)` instead of the layer, or `with poptorch.IPU(1):` in `forward`.

    The stage is the IPU. `poptorch.Block` and `poptorch.BeginBlock` say the same and more.
    """

    def __init__(self, ipu_id: int, layer_to_call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        warn_once("poptorch.IPU is deprecated: use poptorch.Block or poptorch.BeginBlock with ipu_id.")
        _ipu(ipu_id)
        self.ipu_id, self.layer_to_call = ipu_id, layer_to_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.layer_to_call is None:
            raise Error(
                f"IPU({self.ipu_id}) has no layer to call: write IPU({self.ipu_id}, layer), or use it as a scope."
            )
        _begin(f"ipu_{self.ipu_id}", self.ipu_id)
        return self.layer_to_call(*args, **kwargs)

    def __enter__(self) -> None:
        _begin(f"ipu_{self.ipu_id}", self.ipu_id, scoped=True)

    def __exit__(self, *exception: Any) -> None:
        _end()
