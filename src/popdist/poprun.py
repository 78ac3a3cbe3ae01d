"""The command `poprun`: starts a program as several instances, by a call of torchrun that it prints first."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any, NoReturn

import click

import poptorch
from popdist.launch import PORT, LaunchPlan, default_threads

_NOTES = {
    "mpi_local_args": "there is no MPI: use environment variables instead",
    "mpi_global_args": "there is no MPI: use environment variables instead",
    "numa_aware": "use numactl or taskset for that",
    "num_ilds": "there are no IPU links between emulated IPUs",
    "vipu_server_host": "emulated IPUs need no partition",
    "vipu_server_port": "emulated IPUs need no partition",
    "vipu_server_timeout": "emulated IPUs need no partition",
    "vipu_partition": "emulated IPUs need no partition",
    "vipu_allocation": "emulated IPUs need no partition",
    "vipu_cluster": "emulated IPUs need no partition",
    "update_partition": "emulated IPUs need no partition",
    "reset_partition": "emulated IPUs need no partition",
    "remove_partition": "emulated IPUs need no partition",
    "host_subnet": "set GLOO_SOCKET_IFNAME to the name of a network interface instead",
    "host_netmask": "set GLOO_SOCKET_IFNAME to the name of a network interface instead",
}  # what is accepted, and why it has no effect


def _unused(command: Any) -> Any:
    """Declare the arguments that have no effect."""
    for name, note in _NOTES.items():
        command = click.option(f"--{name.replace('_', '-')}", name, help=f"Has no effect: {note}.")(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False})
@click.option("-n", "--num-instances", type=int, default=1, show_default=True, help="Processes, of all hosts together.")
@click.option("-r", "--num-replicas", type=int, help="Replicas, of all instances together [default: one each].")
@click.option("-p", "--ipus-per-replica", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("-H", "--host", "--hosts", "hosts", default="localhost", help="Names of machines, with commas between.")
@click.option("--port", type=int, default=PORT, show_default=True, help="Where machines meet: a port of the first.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, show_default=True, help="After a failure.")
@click.option("--only-output-from-instance", type=int, help="Show the output of this instance of each host only.")
@click.option("--executable-cache-path", help="Folder for compiled programs.")
@click.option("-v", "--verbose", count=True, help="Begin each line of output with the number of its instance.")
@click.option("--dry-run", is_flag=True, help="Print the call for each host, and start nothing.")
@_unused
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True)
def main(hosts: str, num_instances: int, num_replicas: int | None, dry_run: bool, **more: Any) -> None:
    """Start PROGRAM as several instances that share out replicas: poprun --num-instances 2 --num-replicas 4 train.py"""
    for name, note in _NOTES.items():
        if more.get(name) is not None:
            click.echo(f"poprun: note: --{name.replace('_', '-')} has no effect: {note}", err=True)
    try:
        plan = LaunchPlan(
            tuple(more["program"]),
            num_instances,
            num_instances if num_replicas is None else num_replicas,
            more["ipus_per_replica"],
            tuple(name.partition(":")[0] for name in hosts.split(",") if name),
            more["port"],
            more["max_restarts"],
            more["only_output_from_instance"],
            more["verbose"] > 0,
            more["executable_cache_path"],
        )
    except poptorch.Error as error:
        raise click.UsageError(error.message) from None
    _start(plan, dry_run=dry_run)


def _start(plan: LaunchPlan, *, dry_run: bool) -> None:
    here = _own_host(plan.hosts)
    logs = tempfile.mkdtemp(prefix="poprun-") if plan.prefixed and not dry_run else None
    for host, name in enumerate(plan.hosts):
        if host == here:
            click.echo(f"poprun: {plan.text(host, logs)}", err=True)
        else:
            click.echo(f"poprun: to be started on {name}: {plan.text(host)}", err=True)
    if dry_run:
        return
    if here is None:
        raise click.UsageError(
            f"this machine ({socket.gethostname()}) is none of {', '.join(plan.hosts)}: start poprun on each of them"
        )
    _replace(plan.command(here, logs), plan)


def _own_host(hosts: tuple[str, ...]) -> int | None:
    """Which of the hosts this machine is: the one with its name, or with one of its addresses."""
    own = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    named = [index for index, name in enumerate(hosts) if name in own]
    return next(iter(named or [index for index, name in enumerate(hosts) if _is_here(name)]), None)


def _is_here(host: str) -> bool:
    """Whether a name or address leads to this machine: only there a socket can be bound to it."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as found:
            found.bind(address)
    except OSError:
        return False
    return True


def _replace(command: list[str], plan: LaunchPlan) -> NoReturn:
    """Become torchrun, so that signals reach it."""
    threads = default_threads(os.environ, plan.per_host)
    os.execvpe(command[0], command, {**os.environ, **threads, **plan.environment})


if __name__ == "__main__":
    main()
