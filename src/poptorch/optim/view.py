"""What a compiled model shows of an optimiser under the names that things have on an IPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from poptorch._logging import logger
from poptorch.errors import OptimizerStateError, explain
from poptorch.optim.plan import GroupPlan, OptimizerPlan

_MOMENTS = {"exp_avg": "Accl1", "exp_avg_sq": "Accl2", "step": "Step"}
_STATE_NAMES: dict[str, dict[str, str]] = {
    "SGD1": {"combined_accumulator": "Accl"},
    "SGD2": {"momentum_buffer": "Accl1"},
    "ADAM": _MOMENTS,
    "ADAMW": _MOMENTS,
    "ADAMW_NO_BIAS": _MOMENTS,
    "LAMB": _MOMENTS,
    "LAMB_NO_BIAS": {"exp_avg": "Accl1", "exp_avg_sq": "Accl2"},
    "RMSPROP": {"square_avg": "Accl1", "momentum_buffer": "Accl3"},
    "RMSPROP_CENTERED": {"square_avg": "Accl1", "grad_avg": "Accl2", "momentum_buffer": "Accl3"},
}
_COUNTER = "step"
_SCALE_FACTOR = "lossScaleUpdateFactor"


@dataclass(frozen=True)
class ProgramView:
    """An optimiser as a compiled program uses it: the numbers it has read, and the names of the parameters."""

    plan: OptimizerPlan
    parameters: dict[str, tuple[torch.nn.Parameter, GroupPlan]]
    divisor: int  # by which the sum of the gradients is divided
    scale_factor: torch.Tensor | None  # of automatic loss scaling
    replica_groups: Mapping[str, int]  # how many groups of replicas have a value of their own, by name of parameter

    @staticmethod
    def has_names_for(plan: OptimizerPlan) -> bool:
        """Whether an IPU has such an optimiser; a `step()` of the user's own has no names there."""
        return plan.kind in _STATE_NAMES

    def state(self, optimizer: Any) -> dict[str, torch.Tensor]:
        """Copies of the tensors that the update changes, which are those in the optimiser's own `state`."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter, key in self._places():
            entries = optimizer.state.get(parameter, {})  # a look at what is not there must not make it
            if key in entries:
                found[name] = self._shown(name, key, entries[key]).detach().clone()
        if self.scale_factor is not None:
            found[_SCALE_FACTOR] = self.scale_factor.clone()
        return found

    def load_state(self, optimizer: Any, loaded: Mapping[str, torch.Tensor]) -> None:
        """Write values into the optimiser's state; what is missing stays as it is, with a warning."""
        places = {name: (parameter, key) for name, parameter, key in self._places()}
        state = optimizer.state
        missing = [name for name, (p, key) in places.items() if name not in loaded and key in state.get(p, {})]
        if missing:
            logger.warning("the loaded optimiser state lacks %s: they keep their values.", ", ".join(missing))
        for name, tensor in loaded.items():
            if name in places:
                parameter, key = places[name]
                entries = state.setdefault(parameter, {})
                if key in entries and self._shown(name, key, entries[key]).shape != tensor.shape:
                    raise OptimizerStateError(_misshapen(name, tensor, self._shown(name, key, entries[key])))
                entries[key] = (tensor.flatten()[0] if key == _COUNTER else tensor).detach().clone()
            elif name == _SCALE_FACTOR and self.scale_factor is not None:
                self.scale_factor.copy_(tensor)

    def _shown(self, name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A state tensor as it looks from outside: there is one counter of steps, shown once per group of replicas."""
        groups = self.replica_groups.get(name.partition("___")[2])
        return tensor if groups is None or key != _COUNTER else tensor.expand(groups)

    def _places(self) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
        """The name of each state tensor on an IPU, and where an optimiser keeps it."""
        for name, (parameter, _) in self.parameters.items():
            for key, ipu_name in _STATE_NAMES[self.plan.kind].items():
                yield f"{ipu_name}___{name}", parameter, key

    def numbers(self) -> dict[str, torch.Tensor]:
        """The numbers that the program uses for each parameter."""
        found = {"lossScaling_FLOAT": self.plan.loss_scaling.value}
        for parameter, (_, group) in self.parameters.items():
            values = {name: attribute.value for name, attribute in group.attributes.items()}
            numbers = self._sgd(group, values) if self.plan.kind.startswith("SGD") else self._adaptive(values)
            found.update({f"{name}___specific___{parameter}": value for name, value in numbers.items()})
        return {name: torch.tensor(value) for name, value in found.items()}

    def _sgd(self, group: GroupPlan, values: dict[str, float]) -> dict[str, float]:
        lr, kept, decay = values["lr"], 1 - values["dampening"], values["weight_decay"]
        scale = self.plan.loss_scaling.value
        if not group.rule.state:
            return {
                "scaledLearningRate0": lr * kept / scale / self.divisor,
                "weightDecayScaleFactor0": 1 - lr * kept * decay,
            }
        velocity = values.get("velocity_scaling", scale)
        number = 1 if self.plan.is_combined else 2
        return {
            f"scaledLearningRate{number}": lr / velocity,
            f"scaledMomentum{number}": values["momentum"],
            f"dampeningScaleFactor{number}": kept * velocity / scale / self.divisor,
            "scaledWeightDecay1": kept * decay * velocity,
        }

    def _adaptive(self, values: dict[str, float]) -> dict[str, float]:
        is_rmsprop = "alpha" in values
        prefix = "adaptive" if is_rmsprop else "adam"
        names = {
            "lr": "learningRate",
            "weight_decay": "weightDecay",
            "beta1": "adamBeta1",
            "beta2": "adamBeta2",
            "eps": f"{prefix}Eps",
            "alpha": "adaptiveAlpha",
            "momentum": "adaptiveMomentum",
            "max_weight_norm": "maxWeightNorm",
        }
        scaling = {f"{prefix}GradientScaling": 1 / (self.plan.loss_scaling.value * self.divisor)}
        return {**{names[name]: value for name, value in values.items()}, **scaling}


def _misshapen(name: str, loaded: torch.Tensor, wanted: torch.Tensor) -> str:
    return explain(
        f"the loaded optimiser state has {name} of shape {list(loaded.shape)}, but {list(wanted.shape)} is needed.",
        fix="load a state dictionary that was saved with the same model",
    )
