"""A tiny extension and a process that loads it: the loader is tested without compiling tarry itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tarry.native._build import Extension

# Plain C API on purpose: it compiles in a fraction of a second, so that every test can start from an empty cache.
MODULE = """\
#include <Python.h>
#include "answer.h"
static PyObject* value(PyObject*, PyObject*) { return PyLong_FromLong(answer()); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tiny", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__tiny() { return PyModule_Create(&module); }
"""
ANSWER = '#include "answer.h"\nlong answer() { return %d; }\n'
HEADER = "#pragma once\nlong answer();\n"

# `import tarry` itself is put off: it would build tarry's own native part in the test's empty cache.
LOAD = """\
import sys
from pathlib import Path
import tarry_command
tarry_command.defer_package()
from tarry.native._build import Extension
from tarry.native._load import load
print(load(Extension("tiny_package._tiny", Path(sys.argv[1]))).value())
"""

# A stand-in for the compiler: notes each compilation, and ends none while the file `hang` exists.
WRAPPER = """\
#!/bin/sh
case " $* " in *" -c "*)
  echo compile >> {directory}/compilations
  while [ -e {directory}/hang ]; do sleep 0.1; done;;
esac
exec g++ "$@"
"""


def tiny(directory: Path, answer: int = 42) -> Extension:
    """Write the sources of the tiny extension: two .cpp files and a header."""
    sources = directory / "csrc"
    sources.mkdir(exist_ok=True)
    (sources / "module.cpp").write_text(MODULE)
    (sources / "answer.cpp").write_text(ANSWER % answer)
    (sources / "answer.h").write_text(HEADER)
    return Extension("tiny_package._tiny", sources)


def wrapper(directory: Path) -> Path:
    """Write the stand-in compiler, hanging at first."""
    (directory / "hang").touch()
    path = directory / "cxx"
    path.write_text(WRAPPER.format(directory=directory))
    path.chmod(0o755)
    return path


def start_loading(extension: Extension, **environment: str) -> subprocess.Popen[str]:
    """A fresh process, in a process group of its own, that loads the extension and prints its value."""
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(extension.sources)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).resolve().parent.parent.parent,
        start_new_session=True,
    )
