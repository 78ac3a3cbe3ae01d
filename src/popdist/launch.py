"""From the arguments of `poprun` to a call of torchrun: pure arithmetic, which starts nothing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import poptorch
from popdist.instance import IPUS_PER_REPLICA, LOCAL_REPLICAS, TOTAL_REPLICAS, UNIFORM

PORT = 29400  # where processes of several machines meet, unless told otherwise


@dataclass(frozen=True)
class LaunchPlan:
    """What is started: so many instances on these hosts, which share out the replicas evenly."""

    program: tuple[str, ...]
    instances: int = 1
    replicas: int = 1
    ipus_per_replica: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    port: int = PORT
    restarts: int = 0
    shown: int | None = None  # the one instance of each host whose output is shown; None: that of all
    prefixed: bool = False  # lines of the output begin with the number of their instance
    cache: str | None = None

    def __post_init__(self) -> None:
        if not self.program:
            raise poptorch.Error("there is no program to start: poprun --num-instances 2 train.py")
        for name, value in {"--num-instances": self.instances, "--num-replicas": self.replicas}.items():
            if value < 1:
                raise poptorch.Error(f"{name} is {value}, but counts something")
        if self.replicas % self.instances:
            raise poptorch.Error(
                f"{self.replicas} replicas (--num-replicas) cannot be shared out evenly to {self.instances} instances "
                "(--num-instances)"
            )
        if self.instances % len(self.hosts):
            raise poptorch.Error(
                f"{self.instances} instances (--num-instances) cannot be shared out evenly to {len(self.hosts)} hosts "
                "(--host)"
            )

    @property
    def per_host(self) -> int:
        """How many instances each host runs."""
        return self.instances // len(self.hosts)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that all instances get."""
        found = {
            TOTAL_REPLICAS: str(self.replicas),
            LOCAL_REPLICAS: str(self.replicas // self.instances),
            IPUS_PER_REPLICA: str(self.ipus_per_replica),
            UNIFORM: "1",
        }
        return found if self.cache is None else {**found, "POPTORCH_CACHE_DIR": self.cache}

    def command(self, host: int, logs: str | None = None) -> list[str]:
        """The call of torchrun on one of the hosts; lines with a prefix go through a folder of logs."""
        call = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.per_host}"]
        call += [f"--max-restarts={self.restarts}", "--role=instance"]
        if len(self.hosts) == 1:
            call += ["--standalone"]
        else:
            call += [f"--nnodes={len(self.hosts)}", f"--node-rank={host}", "--rdzv-backend=static"]
            call += [f"--master-addr={self.hosts[0]}", f"--master-port={self.port}"]
        if self.shown is not None:
            call.append(f"--local-ranks-filter={self.shown}")
        if self.prefixed and logs is not None:
            call += ["--tee=3", f"--log-dir={logs}"]
        is_script = self.program[0].endswith(".py")
        return [*call, *(() if is_script else ("--no-python",)), *self.program]

    def text(self, host: int, logs: str | None = None) -> str:
        """The call as it could be typed."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command(host, logs))])


def default_threads(known: Mapping[str, str], per_host: int) -> dict[str, str]:
    """Threads for each instance of a machine, so that together they have one for each core; a user may decide."""
    if "OMP_NUM_THREADS" in known:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // per_host))}
