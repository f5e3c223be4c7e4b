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
_FOLLOW = {"LOAD_ATTR", "LOAD_METHOD"}
_READ_ATTRIBUTE = {*_FOLLOW, "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP"}
_BUILD_STRING = {"BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC"}
# With these, code reads attributes by names that are data.
_BY_STRING = frozenset({"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__", "__getattribute__"})
_ALL_AT_ONCE = frozenset({"vars", "__dict__"})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made while the program runs


@dataclass(frozen=True)
class Chain:
    """`variable.name.name`: attributes that are read from something that can be found before the code runs."""

    root: str  # "first argument", "closure" or "global"
    variable: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """What a piece of code reads or changes, functions defined in it included."""

    variables: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()  # of anything; those in chains are not among them
    chains: frozenset[Chain] = frozenset()
    written: frozenset[str] = frozenset()  # attributes
    modules: frozenset[str] = frozenset()  # imported where they are used
    by_string: bool = False  # it may read attributes whose names are values of strings that it has
    any_attribute: bool = False  # ... or of strings that it makes


NO_NAMES = Names()


@functools.lru_cache(maxsize=512)
def names_in(code: types.CodeType) -> Names:
    variables, attributes, written, modules, makes_strings = set(), set(), set(), set(), False
    chains: set[Chain] = set()
    chain: Chain | None = None  # that the instruction before has read
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        if operation in _NOTHING:
            continue
        if operation in _FOLLOW and chain is not None and not instruction.is_jump_target:
            chain = Chain(chain.root, chain.variable, (*chain.names, instruction.argval))
            continue
        if chain is not None:
            chains.add(chain)
        chain = _beginning(instruction, code)
        if operation in _READ_VARIABLE or operation in _WRITE_VARIABLE:
            variables.add(instruction.argval)
        elif operation in _WRITE_ATTRIBUTE:
            written.add(instruction.argval)
        elif operation in _READ_ATTRIBUTE:
            attributes.add(instruction.argval)
        elif operation == "IMPORT_NAME":
            modules.add(instruction.argval)
        makes_strings = makes_strings or operation in _BUILD_STRING
    strings = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    if "globals" in variables:
        variables |= strings
    used = variables | attributes | {name for found in chains for name in found.names}
    by_string = not _BY_STRING.isdisjoint(used)
    any_attribute = by_string and (makes_strings or not _ALL_AT_ONCE.isdisjoint(used))
    if by_string:
        attributes |= strings
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            variables |= inner.variables
            attributes |= inner.attributes
            for found in inner.chains:  # what its arguments and its closure are is not known before the code runs
                if found.root == "global":
                    chains.add(found)
                else:
                    attributes.update(found.names)
            written |= inner.written
            modules |= inner.modules
            by_string, any_attribute = by_string or inner.by_string, any_attribute or inner.any_attribute
    return Names(
        variables=frozenset(variables),
        attributes=frozenset(attributes),
        chains=frozenset(found for found in chains if found.names),
        written=frozenset(written),
        modules=frozenset(modules),
        by_string=by_string,
        any_attribute=any_attribute,
    )


def _beginning(instruction: dis.Instruction, code: types.CodeType) -> Chain | None:
    """A chain without names yet, if the instruction loads a variable that can be looked up before the code runs."""
    name = instruction.argval
    match instruction.opname:
        case "LOAD_GLOBAL":
            return Chain("global", name, ())
        case "LOAD_DEREF" if name in code.co_freevars:
            return Chain("closure", name, ())
        case "LOAD_FAST" | "LOAD_FAST_BORROW" if code.co_argcount and name == code.co_varnames[0]:
            return None if _is_stored(name, code) else Chain("first argument", name, ())
    return None


@functools.lru_cache(maxsize=512)
def _is_stored(name: str, code: types.CodeType) -> bool:
    """Whether a local variable may be assigned: by an instruction whose argument names it, alone or among others."""
    for instruction in dis.get_instructions(code):
        if "STORE_FAST" in instruction.opname or instruction.opname == "DELETE_FAST":
            stored = instruction.argval
            if name in (stored if isinstance(stored, tuple) else (stored,)):
                return True
    return False


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
