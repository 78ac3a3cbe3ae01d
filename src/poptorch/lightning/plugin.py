"""`IPUPlugin`: the name and the constructor that `IPUStrategy` had in Lightning 1.4 and 1.5."""

from __future__ import annotations

from typing import Any

import torch

import poptorch
from poptorch.lightning.strategy import StrategyBehaviour


class PluginBehaviour(StrategyBehaviour):
    """What `IPUPlugin` adds to `IPUStrategy`: its constructor."""

    def __init__(
        self,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: str | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        training_opts: poptorch.Options | None = None,
        inference_opts: poptorch.Options | None = None,
        *,
        autoround_num_ipus: bool = True,
        convert_model_to_half: bool = False,
    ) -> None:
        """A strategy for `Trainer(plugins=...)`; see `IPUStrategy`.

        Args:
            convert_model_to_half: weights and inputs in float16, whatever `precision=` says.
        """
        self.package.warn_deprecated("`IPUPlugin` is the older name of `poptorch.lightning.IPUStrategy`.")
        super().__init__(
            device_iterations=device_iterations,
            autoreport=autoreport,
            autoreport_dir=autoreport_dir,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=self.precision_class("16-true") if convert_model_to_half else None,
            training_opts=training_opts,
            inference_opts=inference_opts,
            autoround_num_ipus=autoround_num_ipus,
        )
        self.convert_model_to_half = convert_model_to_half
