"""Imports go one way: each folder may use only those that come before it in the life of a model."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "poptorch"

LEAVES = {
    "errors",
    "enums",
    "environment",
    "_logging",
    "_version",
    "autocasting",
    "compiling",
    "faults",
    "interrupts",
    "late_imports",
    "profiling",
    "progress",
}  # open to all
LEAF_IMPORTS = {
    "autocasting": {"errors"},
    "environment": {"errors"},
    "_logging": {"environment", "errors"},
    "faults": {"environment", "errors"},
    "late_imports": {"_logging", "environment"},
    "profiling": {"_logging"},
}
ALIASES = {"_args_parser", "_impl", "_poplar_executor", "poptorch_core", "testing"}  # other doors; nobody imports them

MAY_IMPORT = {
    "structure": set(),
    "ir": set(),
    "ipu": {"ir"},
    "processes": set(),
    "options": {"ipu", "processes"},
    "optim": set(),
    "ops": {"ir"},
    "capture": {"structure", "ir", "options", "optim", "ops"},
    "annotations": {"capture", "ops"},
    "executable": {"structure", "ir"},
    "compiler": {"structure", "ir", "options", "executable", "ipu"},
    "engines": {"ir", "executable"},
    "runtime": {"ir", "executable", "engines", "processes"},
    "store": {"ir", "executable", "engines"},
    "report": {"executable", "runtime"},
    "data": {"structure", "options"},
}
MAY_IMPORT["model"] = set(MAY_IMPORT)
MAY_IMPORT.update({alias: set(MAY_IMPORT) - ALIASES for alias in ALIASES})
MAY_IMPORT["cli"] = {"", *MAY_IMPORT}
MAY_IMPORT["lightning"] = {""}  # what `import poptorch` offers

MODULES = sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    """The folder of a module, or its own name if it lies at the top."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_layers(path: Path) -> dict[str, int]:
    """The layers of ours that a module imports, wherever in the file, with the line of the first import."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "poptorch":
                found.setdefault(rest.partition(".")[0], node.lineno)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_what_its_layer_may(path):
    layer = layer_of(path)
    if layer == "__init__":
        return
    allowed = LEAF_IMPORTS.get(layer, set()) if layer in LEAVES else MAY_IMPORT[layer] | LEAVES | {layer}
    wrong = {name: line for name, line in imported_layers(path).items() if name not in allowed}
    assert not wrong, f"{layer} imports {wrong}, but may only import {sorted(allowed)}"


def test_every_top_level_name_belongs_to_a_layer():
    assert {layer_of(path) for path in MODULES} <= LEAVES | set(MAY_IMPORT) | {"__init__"}


PRIVATE = re.compile(r"torch\.(?:[a-z_]+\.)*_[a-zA-Z]|torch\.fx\.experimental")
DOORS = {  # the modules that may import private names of PyTorch: one for each folder that needs any
    "capture": {"private"},
    "compiler": {"private"},
    "data": {"torch_workers"},
    "engines": {"private", "private_tools"},  # the second for what must not bring the code generator along
    "ir": {"values", "inline"},
    "ops": {"private"},
    "optim": {"host_step"},
    "processes": {"private"},
}


def private_imports(path: Path) -> list[str]:
    """The private names of PyTorch that a module imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if PRIVATE.match(name)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_of_pytorch_come_through_doors(path):
    imported = private_imports(path)
    assert not imported or path.stem in DOORS.get(layer_of(path), set()), imported


def test_tracing_internals_stay_in_capture():
    internals = ("FunctionalTensorMode", "TorchDispatchMode", "get_proxy_slot")
    users = {
        str(path.relative_to(SOURCE)): name
        for path in MODULES
        for name in internals
        if layer_of(path) != "capture" and name in path.read_text(encoding="utf-8")
    }
    assert not users


def test_the_public_module_holds_no_logic():
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    body = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8")).body
    assert all(isinstance(node, allowed) for node in body)


def test_no_module_is_named_for_nothing():
    assert not {path.stem for path in MODULES} & {"utils", "helpers", "common", "misc"}


def test_importing_poptorch_does_not_import_what_only_a_compilation_needs(programs):
    code = "import sys; print([name for name in ('sympy', 'torch._inductor') if name in sys.modules])"
    assert programs.run(code).output == "[]\n"
