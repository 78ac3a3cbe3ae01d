"""What the commands about the cache say."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from poptorch import environment
from poptorch.errors import FileError
from poptorch.store import Cache, cache_folder
from poptorch.store.cache import Wanted
from poptorch.store.files import is_our_code

_SHOWN = 12  # characters of a key that tell it from others


def find(folder: Path | None) -> Cache:
    """The cache in a folder, or the one that models use by default."""
    try:
        return Cache(folder or cache_folder(environment.CACHE_DIR.read()))
    except OSError as error:
        raise click.ClickException(f"there is no folder for a cache: {error}") from error


def listing(cache: Cache) -> Iterator[str]:
    """A line for each program, and one for all of them."""
    entries, total = cache.entries(), 0
    for entry in entries:
        status = entry.stat()
        total += status.st_size
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        try:
            what = str(cache.about(entry).get("program", "?"))
        except FileError:
            what = "damaged"
        yield f"{entry.name[:_SHOWN]}  {status.st_size / 2**20:7.1f} MB  {used}  {what}"
    limit = environment.CACHE_SIZE.integer()
    yield f"{len(entries)} program(s), {total / 2**20:.1f} of {limit} MB in {cache.folder}"


def explanation(cache: Cache, key: str | None) -> Iterator[str]:
    """Why something was not found: what its nearest neighbour in the cache was made for."""
    misses = [miss for miss in cache.misses() if key is None or _key(miss).startswith(key)]
    if not misses:
        yield f"nothing{' of this key' if key else ''} was looked for in vain in {cache.folder}"
        return
    miss = misses[-1]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(miss["time"])))
    yield f"{_key(miss)[:_SHOWN]}  {miss['program']}"
    yield f"was not found on {when}"
    if cache.path(_key(miss)).exists():
        yield "and is there now: the next process finds it"
    nearest = _nearest(cache, miss["facts"])
    if nearest is None:
        yield "because no program of this kind was there: the model, its batch, its optimiser or its options are new"
        return
    yield "the nearest program that is there differs in:"
    for name, (there, wanted) in nearest.items():
        yield f"  {name}: {there} there, {wanted} wanted"


def _key(miss: Mapping[str, Any]) -> str:
    return Wanted(miss["facts"], "").key


def _nearest(cache: Cache, wanted: Mapping[str, str]) -> dict[str, tuple[str, str]] | None:
    """What the entry of the same program that is most like this one differs in."""
    found: list[dict[str, tuple[str, str]]] = []
    for entry in cache.entries():
        try:
            facts = cache.about(entry).get("facts", {})
        except FileError:
            continue
        if facts.get("program") == wanted.get("program") and facts != wanted:
            found.append({k: (facts.get(k, "-"), v) for k, v in wanted.items() if facts.get(k) != v})
    return min(found, key=len, default=None)


def verification(cache: Cache) -> dict[Path, str | None]:
    """For each file what is wrong with it, if anything is."""
    found: dict[Path, str | None] = {}
    for entry in cache.entries():
        try:
            found[entry] = None if is_our_code(cache.open(entry)) else "it was not made by this user on this machine"
        except FileError as error:
            found[entry] = error.message.splitlines()[0]
    return found
