"""What a piece of code can name, and whose code it is."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_OWN = Path(__file__).parents[1]
_PACKAGES = [str(Path(torch.__file__).parent), str(_OWN)]
_PACKAGES += [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOREIGN = ("<frozen", *(f"{path}/" for path in _PACKAGES))

_READ_VARIABLE = {"LOAD_GLOBAL", "LOAD_NAME"}
_WRITE_VARIABLE = {"STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL"}
_WRITE_ATTRIBUTE = {"STORE_ATTR", "DELETE_ATTR"}
_READ_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_BUILD_STRING = {"BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"}
# With these, code reads attributes by names that are data.
_BY_STRING = frozenset({"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__", "__getattribute__"})
_ALL_AT_ONCE = frozenset({"vars", "__dict__"})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made while the program runs


@dataclass(frozen=True)
class Names:
    """What a piece of code reads or changes, functions defined in it included."""

    variables: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()  # attributes
    modules: frozenset[str] = frozenset()  # imported where they are used
    by_string: bool = False  # it may read attributes whose names are values of strings that it has
    any_attribute: bool = False  # ... or of strings that it makes


NO_NAMES = Names()


@functools.lru_cache(maxsize=512)
def names_in(code: types.CodeType) -> Names:
    variables, attributes, written, modules, makes_strings = set(), set(), set(), set(), False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READ_VARIABLE or instruction.opname in _WRITE_VARIABLE:
            variables.add(instruction.argval)
        elif instruction.opname in _WRITE_ATTRIBUTE:
            written.add(instruction.argval)
        elif instruction.opname in _READ_ATTRIBUTE:
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            modules.add(instruction.argval)
        makes_strings = makes_strings or instruction.opname in _BUILD_STRING
    strings = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    if "globals" in variables:
        variables |= strings
    used = variables | attributes
    by_string = not _BY_STRING.isdisjoint(used)
    any_attribute = by_string and (makes_strings or not _ALL_AT_ONCE.isdisjoint(used))
    if by_string:
        attributes |= strings
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            variables |= inner.variables
            attributes |= inner.attributes
            written |= inner.written
            modules |= inner.modules
            by_string, any_attribute = by_string or inner.by_string, any_attribute or inner.any_attribute
    return Names(
        frozenset(variables), frozenset(attributes), frozenset(written), frozenset(modules), by_string, any_attribute
    )


def is_foreign(file: str) -> bool:
    """Whether code is the standard library's, torch's, tarry's or an installed package's: taken not to change."""
    return file.startswith(_FOREIGN)


class Ownership:
    """Whose code is looked into: the user's, which includes the package of the function, should it be installed."""

    def __init__(self, function: Any) -> None:
        self._package = ""
        while isinstance(function, functools.partial):
            function = function.func
        named = function if isinstance(function, types.FunctionType | types.MethodType) else type(function)
        module = sys.modules.get(getattr(named, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if module is None or not file or not is_foreign(file):
            return
        top = module.__name__.partition(".")[0]
        if top == "tarry":  # its examples
            self._package = f"{Path(file).parent}/" if Path(file).parent != _OWN else ""
        elif top != "torch" and top not in sys.stdlib_module_names and "." in module.__name__:
            self._package = f"{Path(getattr(sys.modules.get(top), '__file__', None) or file).parent}/"
        elif top != "torch" and top not in sys.stdlib_module_names:
            self._package = file

    def is_foreign(self, file: str) -> bool:
        return is_foreign(file) and not (self._package and file.startswith(self._package))

    def is_foreign_module(self, name: str) -> bool:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            return self.is_foreign(file)
        top, dot, _ = name.partition(".")
        if dot:
            return self.is_foreign_module(top)
        return name in sys.builtin_module_names or name in sys.stdlib_module_names

    def is_foreign_class(self, cls: type) -> bool:
        if cls.__module__ == "builtins":  # or in a namespace without a name
            return not cls.__flags__ & _HEAP_TYPE
        return self.is_foreign_module(cls.__module__)


def package_of(cls: type) -> str:
    """The name of the package that a class belongs to."""
    return cls.__module__.partition(".")[0]
