"""The container of everything we write to disk: named parts of bytes and a manifest, in a zip that is not compressed.

Any change of a byte is noticed: the comment at the end is the SHA-256 of everything before it, and the manifest has
that of every part. Nothing of a container is executed, unpacked or looked up by a name that it holds; a part is bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poptorch.errors import FileError, explain
from poptorch.store.atomic import write_atomically

FORMAT, FORMAT_VERSION = "poptorch", 1
MANIFEST = "manifest.json"
MOST_PARTS = 4096
MOST_JSON_NBYTES = 512 * 2**20
_DIGEST_NBYTES = 64  # hexadecimal
_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)?(\.[a-z]+)?")
_DATE = (1980, 1, 1, 0, 0, 0)  # the same content gives the same bytes


@dataclass(frozen=True)
class Container:
    """What a file holds: what its manifest says, and the parts by name."""

    about: Mapping[str, Any]
    parts: Mapping[str, bytes]

    def json(self, name: str) -> Any:
        """A part that is JSON; `FileError` if there is no such part, or it is something else."""
        if name not in self.parts:
            raise FileError(f"the part {name} is missing.")
        return parse_json(self.parts[name], name)


def parse_json(content: bytes, name: str) -> Any:
    """What JSON text says; numbers are finite, and nothing is nested without end."""
    if len(content) > MOST_JSON_NBYTES:
        raise FileError(f"{name} has {len(content)} bytes, more than any program needs.")
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name} is no JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def json_part(value: object) -> bytes:
    """A part that holds JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def write_container(path: Path, about: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
    """Write a file that is there as a whole or not at all, whatever happens on the way; raises `OSError`."""
    write_atomically(path, pack(about, parts))


def pack(about: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """The bytes of a container."""
    listed = {name: {"nbytes": len(part), "sha256": sha256(part)} for name, part in parts.items()}
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, **about, "parts": listed}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, part in {MANIFEST: json_part(manifest), **parts}.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), part)
        archive.comment = b"0" * _DIGEST_NBYTES
    content = buffer.getbuffer()[:-_DIGEST_NBYTES]
    return bytes(content) + sha256(content).encode()


def read_container(path: Path) -> Container:
    """The content of a file; `FileError` if it is damaged, cut short, or was not written by `write_container`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        return unpack(content)
    except FileError as error:
        fix = "save or compile the model again, or copy the file again if it came from elsewhere"
        raise FileError(explain(f"Invalid file {path}: {error.message}", fix=fix)) from error


def unpack(content: bytes) -> Container:
    """The content of a container of which these are the bytes."""
    if not content.startswith(b"PK"):
        raise FileError("it is not a file that poptorch has written.")
    whole = memoryview(content)
    if sha256(whole[:-_DIGEST_NBYTES]).encode() != content[-_DIGEST_NBYTES:]:
        raise FileError("it is damaged, or cut short: the checksum at its end is not that of its content.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            _check_entries(entries, len(content))
            parts = {entry.filename: archive.read(entry) for entry in entries}
    except FileError:
        raise
    except Exception as error:  # of zipfile, which raises many kinds
        raise FileError(f"it is no container: {type(error).__name__}: {error}") from error
    manifest = parse_json(parts.pop(MANIFEST, b""), MANIFEST)
    _check_manifest(manifest, parts)
    about = {name: value for name, value in manifest.items() if name != "parts"}
    return Container(about, parts)


def _check_entries(entries: list[zipfile.ZipInfo], nbytes: int) -> None:
    if len(entries) > MOST_PARTS:
        raise FileError(f"it has {len(entries)} parts, more than any model needs.")
    if len({entry.filename for entry in entries}) != len(entries):
        raise FileError("it has two parts of one name.")
    if any(not _NAME.fullmatch(entry.filename) or ".." in entry.filename for entry in entries):
        raise FileError("it has a part of a name that poptorch does not give.")
    is_packed = any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries)
    if is_packed or sum(entry.file_size for entry in entries) > nbytes:
        raise FileError("its parts are compressed, which poptorch does not do.")


def _check_manifest(manifest: Any, parts: Mapping[str, bytes]) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FileError("its manifest is not one of poptorch.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise FileError(f"its format is number {manifest.get('format_version')}, and this poptorch reads number 1.")
    listed = manifest.get("parts")
    if not isinstance(listed, dict) or listed.keys() != parts.keys():
        raise FileError("its parts are not those that the manifest lists.")
    for name, part in parts.items():
        if listed[name] != {"nbytes": len(part), "sha256": sha256(part)}:
            raise FileError(f"the part {name} is not the one that the manifest lists.")


def sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
