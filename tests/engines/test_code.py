"""Native code from bytes: it leaves nothing behind that other tools could trip over."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

from poptorch.engines.code import load_codes
from poptorch.engines.toolchain import find_compiler

SOURCE = r"""
#include <Python.h>
static PyObject* first(PyObject* self, PyObject* handles) { Py_INCREF(handles); return handles; }
static PyMethodDef first_methods[] = {{"first", first, METH_O, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef first_module = {PyModuleDef_HEAD_INIT, "first", "", -1, first_methods};
PyMODINIT_FUNC PyInit_first(void) { return PyModule_Create(&first_module); }
static PyObject* second(PyObject* self, PyObject* handles) { return PyBool_FromLong(1); }
static PyMethodDef second_methods[] = {{"second", second, METH_O, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef second_module = {PyModuleDef_HEAD_INIT, "second", "", -1, second_methods};
PyMODINIT_FUNC PyInit_second(void) { return PyModule_Create(&second_module); }
"""


@pytest.fixture
def content(tmp_path):
    """The bytes of a library with a function that gives back what it is given, and one that says yes."""
    source, library = tmp_path / "code.cpp", tmp_path / "code.so"
    source.write_text(SOURCE)
    include = sysconfig.get_paths()["include"]
    subprocess.run([find_compiler(), "-shared", "-fPIC", f"-I{include}", source, "-o", library], check=True)
    return library.read_bytes()


def test_loaded_code_is_not_among_the_modules_whose_files_others_read(content):
    """Its bytes were in memory behind a number of a descriptor, which something else has by now, perhaps a pipe."""
    before = set(sys.modules)
    code = load_codes(content, ["first"])["first"]
    assert code.native is not None
    assert code.native([1, 2]) == [1, 2]
    assert set(sys.modules) == before
    assert getattr(code.native.__self__, "__file__", None) is None


def test_the_same_bytes_can_be_loaded_twice(content):
    first, second = (load_codes(content, ["first"])["first"] for _ in range(2))
    assert first.native is not None
    assert second.native is not None
    assert first.native("a") == second.native("a") == "a"


def test_a_library_has_several_functions(content):
    codes = load_codes(content, ["second", "first"])
    assert [(name, code.entry, code.content) for name, code in codes.items()] == [
        ("second", "second", content),
        ("first", "first", content),
    ]
    natives = [code.native for code in codes.values()]
    assert None not in natives
    assert [native("a") for native in natives if native is not None] == [True, "a"]
