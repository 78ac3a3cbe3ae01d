"""Executables and their native code as parts of a container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from poptorch._logging import logger
from poptorch._version import __version__
from poptorch.engines import Kernel, Portable, kernels_from, make_portable, surroundings
from poptorch.errors import FileError
from poptorch.executable import Executable, executable_from
from poptorch.executable.data import origins_in, plain, tensors_in
from poptorch.ir.digest import digest
from poptorch.ir.serial import FormatError
from poptorch.store.container import Container, json_part, parse_json, sha256
from poptorch.store.tensors import tensors_from, tensors_part
from poptorch.store.trust import is_ours, sign

_EXECUTABLE, _ORIGINS, _CONSTANTS = "executable.json", "origins.json", "constants.safetensors"
_CODE, _CHECKSUM = "code/kernels.json", "code/checksum"


def about_us() -> dict[str, Any]:
    """What a manifest says about who wrote it."""
    return {"poptorch": __version__, "torch": torch.__version__, "processor": surroundings()["processor"]}


def programs_digest(executable: Executable) -> str:
    """A name for what native code is made from, whatever the weights are and wherever the model was written."""
    return digest(plain(executable.programs), tensors_in(executable.programs))


def executable_parts(executable: Executable) -> dict[str, bytes]:
    """An executable as parts of a container; `FormatError` if it holds something that data cannot."""
    return {
        _EXECUTABLE: json_part(plain(executable)),
        _ORIGINS: json_part(origins_in(executable)),
        _CONSTANTS: tensors_part(tensors_in(executable)),
    }


def read_executable(container: Container) -> Executable:
    """The executable of a container; `FileError` if there is none that makes sense."""
    constants = tensors_from(container.parts.get(_CONSTANTS, b""))
    try:
        return executable_from(container.json(_EXECUTABLE), container.json(_ORIGINS), constants)
    except FormatError as error:
        raise FileError(f"the program in it makes no sense: {error}") from error


def code_parts(made_from: str, kernels: Mapping[str, Kernel]) -> dict[str, bytes]:
    """Native code as parts of a container: none if there is none that can be kept."""
    found = make_portable(kernels)
    if found is None:
        return {}
    names = [f"code/{number}.so" for number in range(len(found.codes))]
    description = json_part(
        {
            "made_from": made_from,
            "surroundings": surroundings(),
            "kernels": found.kernels,
            "codes": {name: sha256(code) for name, code in zip(names, found.codes, strict=True)},
        }
    )
    checksum = sign(description)
    if checksum is None:
        return {}
    return {_CODE: description, _CHECKSUM: checksum.encode(), **dict(zip(names, found.codes, strict=True))}


def read_kernels(
    container: Container, made_from: str, here: Mapping[str, str] | None = None, *, trusted: bool = False
) -> dict[str, Kernel] | None:
    """Kernels from native code that this user made here, for the same programs and surroundings; else None.

    The surroundings are those of now, unless others are given. If the user has said that the code is to be `trusted`,
    it does not matter who made it.
    """
    reason = why_not_usable(container, made_from, here, trusted=trusted)
    if reason:
        logger.info("there is no native code to use in it: %s", reason)
        return None
    data = parse_json(container.parts[_CODE], _CODE)
    return kernels_from(Portable(data["kernels"], tuple(container.parts[name] for name in data["codes"])))


def is_our_code(container: Container) -> bool:
    """Whether all native code of a container was made by this user on this machine."""
    description = container.parts.get(_CODE, b"")
    return is_ours(description, container.parts.get(_CHECKSUM, b"").decode(errors="replace"))


def why_not_usable(
    container: Container, made_from: str, here: Mapping[str, str] | None = None, *, trusted: bool = False
) -> str:
    """Why native code is not to be loaded; empty if it may be."""
    if _CODE not in container.parts:
        return "it holds none"
    if not trusted and not is_our_code(container):
        return "it was not made by this user on this machine"
    data = parse_json(container.parts[_CODE], _CODE)
    if any(sha256(container.parts.get(name, b"")) != wanted for name, wanted in data["codes"].items()):
        return "it is not the code that was signed"
    if data["made_from"] != made_from:
        return "it was made from another program"
    here = surroundings() if here is None else here
    differing = [name for name, value in data["surroundings"].items() if here.get(name) != value]
    return f"it was made for another {', '.join(differing)}" if differing else ""
