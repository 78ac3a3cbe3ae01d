"""The commands and their arguments; what they print is made elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import poptorch
from poptorch.cli import cached, machine


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(poptorch.__version__, prog_name="poptorch")
def main() -> None:
    """Tools around compiled models."""


@main.command()
def env() -> None:
    """Print what to paste into a bug report: versions, engine, compiler, threads, cache, IPUs."""
    facts = machine.facts()
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


@main.command()
def doctor() -> None:
    """Check what compiling and loading data need, and say how to mend what is missing; ends with 1 if something is."""
    findings = machine.examine()
    for finding in findings:
        click.echo(f"{'ok ' if finding.problem is None else 'BAD'} {finding.subject}: {finding.state}")
        if finding.problem is not None:
            click.echo(f"    fix: {finding.problem}")
    sys.exit(any(finding.problem is not None for finding in findings))


@main.group()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Another folder than the usual one.")
@click.pass_context
def cache(context: click.Context, folder: Path | None) -> None:
    """Look at the folder of compiled programs."""
    context.obj = cached.find(folder)


@cache.command()
@click.pass_obj
def ls(folder: cached.Cache) -> None:
    """List the programs that are kept, the one that was used last at the end."""
    for line in cached.listing(folder):
        click.echo(line)


@cache.command()
@click.argument("key", required=False)
@click.pass_obj
def explain(folder: cached.Cache, key: str | None) -> None:
    """Say why the last model (or the one of this key) was compiled instead of found."""
    for line in cached.explanation(folder, key):
        click.echo(line)


@cache.command()
@click.option("--megabytes", type=click.IntRange(min=0), default=0, help="How much may stay (default: nothing).")
@click.pass_obj
def prune(folder: cached.Cache, megabytes: int) -> None:
    """Remove programs, those that were used least recently first."""
    removed = folder.make_room(megabytes * 2**20)
    click.echo(f"removed {len(removed)} program(s)")


@cache.command()
@click.option("--remove", is_flag=True, help="Remove what is damaged.")
@click.pass_obj
def verify(folder: cached.Cache, remove: bool) -> None:
    """Read every file; ends with 1 if one is damaged, or was made by somebody else."""
    found = cached.verification(folder)
    for path, problem in found.items():
        click.echo(f"{'ok ' if problem is None else 'BAD'} {path.name}{'' if problem is None else f': {problem}'}")
        if problem is not None and remove:
            path.unlink()
    click.echo(f"{len(found)} file(s)")
    sys.exit(any(problem is not None for problem in found.values()))
