"""`Optimizer`: what all optimisers of `poptorch.optim` share beside their torch parent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from poptorch.errors import OptimizerError, explain
from poptorch.optim.attributes import VariableAttributes

_FLOATS = (torch.float16, torch.float32)


class Optimizer:
    """The mix-in of every optimiser in `poptorch.optim`.

    State belongs to the optimiser, in the layout of torch: a compiled step changes the tensors in `state` in place. So
    `state_dict()` is always current. It has two entries more than torch's once a model is compiled with the optimiser:
    `ipu_state` has copies of these tensors under the names they have on an IPU, `ipu_param` the numbers the program
    uses.
    """

    OWN: tuple[str, ...] = ()  # the attributes that torch does not know, kept by copying and pickling

    state: dict[Any, Any]
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def _set_up(self, given: Mapping[str, Any], **own: Any) -> None:
        """Keep PopTorch's own settings, and note which attributes were given and are therefore variable."""
        for name, value in own.items():
            if name.endswith("accum_type"):
                check_accumulation_type(name, value)
            setattr(self, name, value)
        variable = [name for name, value in given.items() if value is not None]
        self.variable_attrs = VariableAttributes(
            [name for name in variable if name in self.defaults or name == "loss_scaling"],
            [*self.defaults, "loss_scaling"],
        )
        self.ipu_state_is_dirty = False  # whether something was loaded that the program has not read yet
        self.host_state_is_dirty = False  # never: the program works on the tensors in `state`
        self._view: Any = None  # what a compiled model knows about this optimiser
        self._loaded_ipu_state: dict[str, torch.Tensor] = {}  # what was loaded before its names were known

    def state_dict(self) -> dict[str, Any]:
        """What torch's dictionary has, and a copy of the state under the names that an IPU has for it."""
        found: dict[str, Any] = super().state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        view = self._view
        found["ipu_state"] = None if view is None else view.state(self)
        found["ipu_param"] = None if view is None else view.numbers()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and settings, from this class or from its twin in torch; the next step uses them."""
        if "state" not in state_dict or "param_groups" not in state_dict:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU: expected a dictionary from the state_dict() of "
                f"{type(self).__name__} or of its twin in torch, not one with the keys {sorted(state_dict)}."
            )
        super().load_state_dict(dict(state_dict))  # pyright: ignore[reportAttributeAccessIssue]
        self._restore_types(state_dict["state"])
        self._loaded_ipu_state = dict(state_dict.get("ipu_state") or {})
        self._take_ipu_state()
        self.ipu_state_is_dirty = True

    def _restore_types(self, saved: Mapping[Any, Any]) -> None:
        """Undo torch's cast of loaded state to the type of the parameter: ours has types of its own."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for key, value in saved.get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != self.state[parameter][key].dtype:
                    self.state[parameter][key] = value.detach().clone()

    def _take_ipu_state(self) -> None:
        """Write tensors that were loaded under their IPU names to where they belong, as soon as the names are known."""
        if self._view is not None and self._loaded_ipu_state:
            self._view.load_state(self, self._loaded_ipu_state)
            self._loaded_ipu_state = {}

    def _connect(self, view: Any) -> None:
        """Called by a model that was compiled with this optimiser, or has read it again."""
        self._view = view
        self._take_ipu_state()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*self.OWN, "variable_attrs", "_loaded_ipu_state")}
        return {
            **super().__getstate__(),  # pyright: ignore[reportAttributeAccessIssue]
            **own,
            "ipu_state_is_dirty": bool(self.state),
            "host_state_is_dirty": False,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._view = self.__dict__.get("_view")
        super().__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def check_accumulation_type(name: str, value: object) -> None:
    if value not in _FLOATS:
        raise OptimizerError(
            explain(f"{name} is {value!r}.", fix=f"choose one of {', '.join(str(kind) for kind in _FLOATS)}")
        )
