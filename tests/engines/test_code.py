"""Native code from bytes: it leaves nothing behind that other tools could trip over."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

from poptorch.engines.code import load_code
from poptorch.engines.toolchain import find_compiler

SOURCE = r"""
#include <Python.h>
static PyObject* entry(PyObject* self, PyObject* handles) { Py_INCREF(handles); return handles; }
static PyMethodDef methods[] = {{"inductor_entry_cpp", entry, METH_O, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "inductor_entry_cpp", "", -1, methods};
PyMODINIT_FUNC PyInit_inductor_entry_cpp(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def content(tmp_path):
    """The bytes of an extension module whose function gives back what it is given."""
    source, library = tmp_path / "code.cpp", tmp_path / "code.so"
    source.write_text(SOURCE)
    include = sysconfig.get_paths()["include"]
    subprocess.run([find_compiler(), "-shared", "-fPIC", f"-I{include}", source, "-o", library], check=True)
    return library.read_bytes()


def test_loaded_code_is_not_among_the_modules_whose_files_others_read(content):
    """Its bytes were in memory behind a number of a descriptor, which something else has by now, perhaps a pipe."""
    before = set(sys.modules)
    code = load_code(content)
    assert code.native is not None
    assert code.native([1, 2]) == [1, 2]
    assert set(sys.modules) == before
    assert getattr(code.native.__self__, "__file__", None) is None


def test_the_same_bytes_can_be_loaded_twice(content):
    first, second = load_code(content), load_code(content)
    assert first.native is not None
    assert second.native is not None
    assert first.native("a") == second.native("a") == "a"
