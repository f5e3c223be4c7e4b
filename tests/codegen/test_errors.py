"""A mistake in a YAML is one error, at its line, that says what to write instead; and all come in one run."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tarry
from tarry.backends import registry
from tarry.codegen.__main__ import main
from tarry.codegen.model import Problem
from tarry.codegen.naming import BUILT_IN_BACKENDS
from tarry.codegen.reading import BackendYamlError, load_backend, read_backend
from tarry.errors import BackendError
from tests.codegen.yamls import PLAIN, SMALL, write

ROOT = Path(__file__).parent.parent.parent
HEAD = "backend: XLA\ncpp_namespace: mine\n"

# What is wrong, the file, and of each error its line, column and some words of message and hint.
CASES: dict[str, tuple[str, list[tuple[int, int, str]]]] = {
    "empty": ("", [(1, 1, "the file is empty")]),
    "only comments": ("# nothing\n\n", [(1, 1, "the file is empty")]),
    "a list": ("- abs\n- add.Tensor\n", [(1, 1, "expected a mapping with the keys of a backend, found a list")]),
    "a text": ("abs\n", [(1, 1, "expected a mapping")]),
    "not YAML": (HEAD + "supported: %abs\n", [(3, 12, "this is not YAML")]),
    "two unclosed brackets": (
        HEAD + "supported: [abs\nautograd: [\n",
        [(3, 12, r"bracket \[ that opens here is not closed.*Write a \]"), (4, 11, "is not closed")],
    ),
    "unclosed brace": (HEAD + "supported:\n  - {abs\n  - neg\n", [(4, 5, "bracket { that opens.*Write a }")]),
    "brackets of several lines": (
        HEAD + "full_codegen: [tanh,\n  sigmoid,\n  abs]\nsupported:\n  -neg\n  - sin\n",
        [(7, 3, "no space after the dash")],
    ),
    "a text of several lines": (
        HEAD + "extra_headers: |\n  -abs\n\n  'word\nclass_name: 'My\n  Class'\nsupported:\n  -neg\n  - sin\n",
        [(7, 13, '"class_name" is a name'), (10, 3, "no space after the dash")],
    ),
    "a value with a colon": (HEAD + "class_name: a: b\n", [(3, 14, "': ' in it has to be in quotes")]),
    "a tab": (HEAD + "supported:\n\t- abs\n", [(4, 1, "indented with a tab.*Use spaces")]),
    "a control character": (HEAD + "supported:\n  - a\x00bs\n", [(4, 6, "this is not YAML")]),
    "unclosed quote": (HEAD + "supported:\n  - 'abs\n", [(4, 5, "quote ' that opens here is not closed")]),
    "unclosed quote, closed by another": (
        HEAD + "supported:\n  - 'abs\n  - 'neg'\n  - sin\n",
        [(4, 5, "quote ' that opens here is not closed")],
    ),
    "no space after the dash": (
        HEAD + "supported:\n  - abs\n  -neg  # so\n  - sin\n",
        [(5, 3, "no space after the dash.*Write `- neg`")],
    ),
    "another dash": (
        HEAD + "supported:\n  - abs\n  \u2013 neg\n  - sin\n",
        [(5, 3, r"begins with an en dash \(U\+2013\), not with '-'.*Write `- neg`")],
    ),
    "no-break space before": (
        HEAD + "supported:\n  - abs\n\u00a0\u00a0- neg\n",
        [(5, 1, r"indented with a no-break space \(U\+00A0\).*Use spaces")],
    ),
    "no-break space after": (
        HEAD + "supported:\n  - abs\n  -\u00a0neg\n",
        [(5, 4, r"after the dash is a no-break space \(U\+00A0\).*Write `- neg`")],
    ),
    "key without its colon": (
        HEAD + "supported:\n  - abs\nfull_codegen\n  - neg\n  # more\n  - sin\n",
        [(5, 1, "the key 'full_codegen' lacks its colon.*Write `full_codegen:`")],
    ),
    "key and value without a colon": (
        "backend: XLA\ncpp_namespace mine\nsupported:\n  - abs\n",
        [(2, 1, "lacks its colon.*Write `cpp_namespace: mine`")],
    ),
    "first entry without its dash": (
        HEAD + "supported:\n  abs\n  - neg\n  # more\n  - sin\n",
        [(4, 3, "lacks its `- `.*Write `- abs`")],
    ),
    "first entry indented less": (
        HEAD + "supported:\n - abs\n  - neg\n  # more\n  - sin\n",
        [(4, 2, "not indented like its neighbours")],
    ),
    "two mistakes of syntax": (
        HEAD + "supported:\n  -abs\n  - neg\n  \u2014 sin\n  - cos\n",
        [(4, 3, "no space after the dash"), (6, 3, "an em dash")],
    ),
    "mistyped key": (HEAD + "suported:\n  - abs\n", [(3, 1, 'unknown key "suported".*Did you mean "supported"')]),
    "mistyped key, its contents": (
        HEAD + "suported:\n  - abss\n",
        [(3, 1, 'unknown key "suported"'), (4, 5, "no operator 'abss'.*Did you mean abs")],
    ),
    "key with a dash": (HEAD + "full-codegen:\n  - abs\n", [(3, 1, 'Did you mean "full_codegen"')]),
    "unknown key": (HEAD + "colour: red\n", [(3, 1, 'unknown key "colour".*The keys are: backend, cpp_namespace')]),
    "key twice": (
        HEAD + "supported:\n  - abs\nsupported:\n  - neg\n",
        [(5, 1, '"supported" is there twice; first in line 3')],
    ),
    "no backend": ("cpp_namespace: mine\nsupported:\n  - abs\n", [(1, 1, 'the key "backend" is missing')]),
    "no namespace": ("backend: XLA\nsupported:\n  - abs\n", [(1, 1, 'the key "cpp_namespace" is missing')]),
    "empty backend": ("backend:\ncpp_namespace: x\n", [(1, 1, '"backend" has no value')]),
    "backend is a list": ("backend: [XLA]\ncpp_namespace: x\n", [(1, 10, '"backend" is a text, found a list')]),
    "unknown backend": (
        "backend: PrivatUse1\ncpp_namespace: x\nsupported: [abs]\n",
        [(1, 10, "'PrivatUse1' is no dispatch key.*PrivateUse1")],
    ),
    "a backend of PyTorch's": (
        "backend: CPU\ncpp_namespace: x\nsupported: [abs]\n",
        [(1, 10, "PyTorch has kernels of its own for CPU")],
    ),
    "no autograd key": (
        "backend: Vulkan\ncpp_namespace: x\nautograd:\n  - abs\n",
        [(4, 5, 'no dispatch key "AutogradVulkan"')],
    ),
    "backend is no key of a device": (
        "backend: Undefined\ncpp_namespace: x\nsupported: [abs]\n",
        [(1, 10, "Undefined is a dispatch key, but not that of a device")],
    ),
    "backend is an autograd key": (
        "backend: AutogradLazy\ncpp_namespace: x\nsupported: [abs]\nautograd: [max_pool3d]\n",
        [(1, 10, "AutogradLazy is a dispatch key.*Write `backend: Lazy`")],
    ),
    "backend stands for many": (
        "backend: CompositeImplicitAutograd\ncpp_namespace: x\nsupported: [abs]\nautograd: [max_pool3d]\n",
        [(1, 10, "not that of a device")],
    ),
    "namespace is no name": (
        "backend: XLA\ncpp_namespace: 'a b; drop'\n",
        [(2, 16, "\"cpp_namespace\" is a name, found 'a b; drop'")],
    ),
    "key of tarry's own file": (HEAD + "operators:\n  leaves: []\n", [(3, 1, 'unknown key "operators"')]),
    "switch": (HEAD + "device_guard: frue\n", [(3, 15, '"device_guard" is true or false, not the text .frue')]),
    "text for a list": (HEAD + "supported: abs\n", [(3, 12, '"supported" is a list, found the text .abs')]),
    "mapping for a list": (HEAD + "supported:\n  abs:\n  neg:\n", [(4, 3, '"supported" is a list, found a mapping')]),
    "list in a list": (HEAD + "supported:\n  - - abs\n    - neg\n", [(4, 5, "an entry of supported is a list")]),
    "empty entry": (HEAD + "supported:\n  -\n  - abs\n", [(4, 4, "an entry of supported is empty")]),
    "number": (HEAD + "supported:\n  - 3\n", [(4, 5, "expected an operator, found the number '3'")]),
    "indented further": (
        HEAD + "supported:\n  - abs\n    - neg\n  - sin\n",
        [(5, 5, "not indented like its neighbours")],
    ),
    "indented less": (
        HEAD + "supported:\n - abs\n  - neg\n  - sin\n",
        [(4, 2, "not indented like its neighbours")],
    ),
    "no dash": (HEAD + "supported:\n  - abs\n    neg\n  - sin\n", [(5, 5, "lacks its `- `.*Write `- neg`")]),
    "colon": (HEAD + "supported:\n  - abs:\n", [(4, 5, "abs ends in a colon")]),
    "mistyped operator": (
        HEAD + "supported:\n  - add.Tensr\n",
        [(4, 5, "no operator 'add.Tensr' in torch.*Did you mean add.Tensor")],
    ),
    "overload left out": (HEAD + "supported:\n  - add\n", [(4, 5, "no operator 'add'.*Did you mean add")]),
    "namespace": (HEAD + "supported:\n  - aten::abs\n", [(4, 5, "no operator 'aten::abs'.*Did you mean abs")]),
    "capitals": (HEAD + "supported:\n  - ABS\n", [(4, 5, "Did you mean abs")]),
    "generated and written": (
        HEAD + "full_codegen:\n  - abs\nsupported:\n  - abs\n",
        [(6, 5, "abs is under supported and, in line 4, under full_codegen")],
    ),
    "two nodes": (
        HEAD + "full_codegen:\n  - abs\nir_gen:\n  - abs\n",
        [(6, 5, "abs is under ir_gen and, in line 4, under full_codegen")],
    ),
    "forward and autograd": (
        HEAD + "supported:\n  - abs\nautograd:\n  - abs\n",
        [(6, 5, "abs is under autograd, and is under supported in line 4")],
    ),
    "variants mixed": (
        HEAD + "supported:\n  - add.Tensor\nautograd:\n  - add.out\n",
        [(6, 5, "add.out is under autograd, and is a variant of add.Tensor, which is under supported in line 4")],
    ),
    "symint unlisted": (HEAD + "supported:\n  - abs\nsymint:\n  - view_copy\n", [(6, 5, "view_copy is under symint")]),
    "symint of a mistyped operator": (
        HEAD + "supported:\n  - view_copi\nsymint:\n  - view_copy\n",
        [(4, 5, "no operator 'view_copi'")],
    ),
    "no node": (
        HEAD + "full_codegen:\n  - record_stream\n",
        [(4, 5, "record_stream cannot have a node: argument 's' has the type Stream")],
    ),
    "unknown detail": (
        HEAD + "supported:\n  - mul.out:\n      structred: true\n",
        [(5, 7, "unknown detail 'structred'.*Did you mean 'structured'")],
    ),
    "detail is no truth value": (
        HEAD + "supported:\n  - mul.out:\n      device_guard: 3\n",
        [(5, 7, "'device_guard' is true or false")],
    ),
    "structured needs out as primary": (
        HEAD + "supported:\n  - mul.out:\n      structured: true\n",
        [(4, 5, "needs `use_out_as_primary: true`")],
    ),
    "neither structured nor out as primary": (
        HEAD + "supported:\n  - bernoulli: {structured: true}\n",
        [(4, 5, "bernoulli is not structured in PyTorch")],
    ),
    "not structured": (
        HEAD + "use_out_as_primary: true\nsupported:\n  - bernoulli:\n      structured: true\n",
        [(5, 5, "bernoulli is not structured in PyTorch")],
    ),
    "meta without structured": (
        HEAD + "supported:\n  - mul.out: {define_meta: true}\n",
        [(4, 5, "`define_meta: true` without `structured: true`")],
    ),
    "two operators in an entry": (
        HEAD + "supported:\n  - mul.out: {device_guard: true}\n    add.out: {device_guard: true}\n",
        [(4, 5, "one entry names several operators: mul.out, add.out")],
    ),
    "every leaf": (HEAD + 'full_codegen: "*"\n', [(3, 15, "only for the file of tarry itself")]),
    "non-native text": (HEAD + "non_native:\n  - cast\n", [(4, 5, "is a mapping with the key `func`")]),
    "no func": (HEAD + "non_native:\n  - opkind: x\n", [(4, 5, "has no `func`")]),
    "mistyped func": (
        HEAD + "non_native:\n  - fnc: cast(Tensor input) -> Tensor\n",
        [(4, 5, 'unknown key .fnc..*Did you mean "func"')],
    ),
    "no schema": (HEAD + "non_native:\n  - func: cast\n", [(4, 11, "`func` is not a schema: 'cast'")]),
    "schema without returns": (HEAD + "non_native:\n  - func: cast(Tensor x)\n", [(4, 11, "is not a schema")]),
    "schema with an unknown type": (
        HEAD + "non_native:\n  - func: cast(Tensr x) -> Tensor\n",
        [(4, 11, "is not a schema: 'cast.*Tensr")],
    ),
    "schema with other spaces": (
        HEAD + "non_native:\n  - func: cast(Tensor x,int y) -> Tensor\n",
        [(4, 11, r"Write `cast\(Tensor x, int y\) -> Tensor`|is not a schema")],
    ),
    "arguments of one name": (
        HEAD + "non_native:\n  - func: expand(Tensor input, int input) -> Tensor\n",
        [(4, 11, "it has two arguments 'input'")],
    ),
    "arguments of one name in Python": (
        HEAD + "non_native:\n  - func: expand(Tensor self, int self_) -> Tensor\n",
        [(4, 11, "it has two arguments 'self_'")],
    ),
    "schema's name with a dash": (
        HEAD + "non_native:\n  - func: ex-pand(Tensor input) -> Tensor\n",
        [(4, 11, "'ex-pand' is no name")],
    ),
    "schema's name with a digit": (
        HEAD + "non_native:\n  - func: 3d(Tensor input) -> Tensor\n",
        [(4, 11, "'3d' is no name")],
    ),
    "schema with a namespace": (
        HEAD + "non_native:\n  - func: lazy::expand(Tensor input) -> Tensor\n",
        [(4, 11, "has a namespace.*Write `expand`")],
    ),
    "default of another type": (
        HEAD + "non_native:\n  - func: expand(Tensor input, int x=abc) -> Tensor\n",
        [(4, 11, "'abc' is no default for 'x', which is of type int.*Write for example `int x=0`")],
    ),
    "default that is None": (
        HEAD + "non_native:\n  - func: expand(Tensor input, int[2] x=None) -> Tensor\n",
        [(4, 11, "'None' is no default for 'x'")],
    ),
    "default of a tensor": (
        HEAD + "non_native:\n  - func: expand(Tensor input=0) -> Tensor\n",
        [(4, 11, "'0' is no default for 'input'.*Only None")],
    ),
    "opkind is no name": (
        HEAD + "non_native:\n  - func: cast(Tensor x) -> Tensor\n    opkind: 'a\"b'\n",
        [(5, 13, "`opkind` is a name")],
    ),
    "merged keys": (
        HEAD + "non_native:\n  - func: one(Tensor x) -> Tensor\n    <<: &d {opkind: my, colour: red}\n",
        [(5, 25, "unknown key 'colour'")],
    ),
    "merge of a text": (
        HEAD + "non_native:\n  - func: one(Tensor x) -> Tensor\n    <<: abc\n",
        [(5, 5, "unknown key .*<<")],
    ),
    "merge of itself": (
        HEAD + "non_native:\n  - &a\n    func: one(Tensor x) -> Tensor\n    <<: *a\n",
        [(6, 5, "unknown key .*<<")],
    ),
    "non-native twice": (
        HEAD + "non_native:\n  - func: cast(Tensor x) -> Tensor\n  - func: cast(Tensor y) -> Tensor\n",
        [(5, 5, "makes a second class Cast; the first is of cast in line 4")],
    ),
    "unknown property": (
        HEAD + "non_native:\n  - func: cast(Tensor x) -> Tensor\n    properties:\n      - ShapeComput\n",
        [(6, 9, "unknown property 'ShapeComput'.*Did you mean ShapeCompute")],
    ),
    "properties are a text": (
        HEAD + "non_native:\n  - func: cast(Tensor x) -> Tensor\n    properties: ShapeCompute\n",
        [(5, 17, "`properties` is a list")],
    ),
    "opkind is a list": (
        HEAD + "non_native:\n  - func: cast(Tensor x) -> Tensor\n    opkind: [a]\n",
        [(5, 13, "`opkind` is a text")],
    ),
}
for _one, _other in (
    ("Lower", "LowerDeclOnly"),
    ("CanBeReused", "CanBeReusedDeclOnly"),
    ("CreateFn", "CreateFnDeclOnly"),
    ("ShapePrecompute", "ShapeCompute"),
    ("ShapeCache", "ShapeCompute"),
):
    CASES[f"{_one} and {_other}"] = (
        HEAD + f"non_native:\n  - func: a(Tensor x) -> Tensor\n    properties: [{_one}, {_other}]\n",
        [(5, 20 + len(_one), f"the property {_other} contradicts {_one}")],
    )


def _errors(folder: Path, text: str) -> list[Problem]:
    return read_backend(write(folder, text))[1]


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_one_error_with_its_place(case: str, tmp_path: Path) -> None:
    text, expected = CASES[case]
    found = _errors(tmp_path, text)
    assert [(p.position.line, p.position.column) for p in found] == [(line, column) for line, column, _ in expected], [
        str(problem) for problem in found
    ]
    for problem, (_, _, words) in zip(found, expected, strict=True):
        assert re.search(words, f"{problem.message} {problem.hint}", re.DOTALL), str(problem)


@pytest.mark.parametrize("text", [SMALL, PLAIN], ids=["small", "plain"])
def test_what_is_right_has_no_errors(text: str, tmp_path: Path) -> None:
    assert _errors(tmp_path, text) == []


def test_merge_keys_give_what_a_mapping_lacks(tmp_path: Path) -> None:
    text = HEAD + (
        "use_out_as_primary: true\nsupported:\n  - mul.out: &d {structured: true, device_guard: true}\n"
        "  - add.out: {device_guard: false, <<: *d}\n"
    )
    details = {operator.name: operator.details for operator in load_backend(write(tmp_path, text)).operators}
    assert details["mul.out"] == {"structured": True, "device_guard": True}
    assert details["add.out"] == {"structured": True, "device_guard": False}


def test_defaults_of_every_type_are_taken(tmp_path: Path) -> None:
    arguments = (
        'Tensor? a=None, int b=-1, int[2] c=0, int[] d=[1,2], float e=1e-05, bool f=True, Scalar g=1.5, str h="x", '
        "ScalarType i=long, MemoryFormat j=contiguous_format, int k=Mean, SymInt l=1"
    )
    text = HEAD + f"non_native:\n  - func: 'many({arguments}) -> Tensor'\n"
    assert [str(problem) for problem in _errors(tmp_path, text)] == []


def test_what_torchgen_read_before_is_not_taken_for_pytorchs(tmp_path: Path) -> None:
    """torchgen notes the keys of backends' YAMLs in what it remembers of PyTorch's own."""
    script = f"""
from torchgen.gen import get_grouped_native_functions, parse_native_yaml
from torchgen.gen_backend_stubs import parse_backend_yaml
from tarry.codegen.natives import native_folder
from tarry.codegen.reading import load_backend
folder = native_folder()
parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
grouped = get_grouped_native_functions(parsed.native_functions)
path = {str(write(tmp_path, HEAD + "supported: [abs]"))!r}
parse_backend_yaml(path, grouped, parsed.backend_indices)
load_backend(path)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_all_mistakes_come_in_one_run_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        SMALL.replace("- relu", "- rely")
        .replace("ir_gen:", "ir_genn:")
        .replace("- LowerX", "")
        .replace("- ShapePrecompute", "- ShapePrecomputed")
    )
    path = write(tmp_path, text)
    with pytest.raises(BackendYamlError) as caught:
        load_backend(path)
    lines = [problem.position.line for problem in caught.value.problems]
    assert len(lines) == 3
    assert lines == sorted(lines)
    assert str(caught.value).count(f"{path}:") == 3


def test_files_that_are_none(tmp_path: Path) -> None:
    write(tmp_path, SMALL, "mine.yaml")
    (missing,) = read_backend(tmp_path / "mime.yaml")[1]
    assert "no such file" in missing.message
    assert "mine.yaml" in missing.hint
    (folder,) = read_backend(tmp_path)[1]
    assert "this is a directory" in folder.message
    assert "mine.yaml" in folder.hint
    (tmp_path / "binary.yaml").write_bytes(b"\x7fELF\x02\xff\xfe\x00")
    (binary,) = read_backend(tmp_path / "binary.yaml")[1]
    assert "this is not text" in binary.message
    (lost,) = read_backend(tmp_path / "no" / "where.yaml")[1]
    assert "no directory" in lost.hint


MUTATIONS: dict[str, Callable[[str], str]] = {
    "swapped letters": lambda line: re.sub(r"- (\w)(\w)", r"- \2\1", line),
    "a letter more": lambda line: re.sub(r"(- [\w.]+)", r"\1x", line),
    "indented further": lambda line: f"   {line}",
    "a colon": lambda line: re.sub(r"(- [\w.]+)", r"\1:", line),
    "no dash": lambda line: line.replace("- ", "  "),
    "two dashes": lambda line: line.replace("- ", "- - "),
    "a namespace": lambda line: line.replace("- ", "- aten::"),
    "a tab": lambda line: "\t" + line.lstrip(),
    "no space after the dash": lambda line: line.replace("- ", "-"),
    "a quote": lambda line: line.replace("- ", "- '"),
    "a double quote": lambda line: line.replace("- ", '- "'),
    "a bracket": lambda line: line.replace("- ", "- ["),
    "a brace": lambda line: line.replace("- ", "- {"),
    "another dash": lambda line: line.replace("- ", "\u2013 "),
    "no-break spaces before": lambda line: line.replace("  ", "\u00a0\u00a0", 1),
    "a no-break space after": lambda line: line.replace("- ", "-\u00a0"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_line_broken_anywhere_is_one_error_at_that_line(mutation: str, tmp_path: Path) -> None:
    lines = SMALL.splitlines()
    entries = [k for k, line in enumerate(lines) if re.fullmatch(r"  - [\w.]+(\s+#.*)?", line)]
    for k in random.Random(mutation).sample(entries, 12):
        broken = [*lines]
        broken[k] = MUTATIONS[mutation](broken[k])
        if broken[k] == lines[k]:
            continue
        found = _errors(tmp_path, "\n".join(broken))
        assert [problem.position.line for problem in found] == [k + 1], (broken[k], [str(p) for p in found])


def test_a_section_without_its_colon_is_one_error_at_that_line(tmp_path: Path) -> None:
    lines = SMALL.splitlines()
    keys = [k for k, line in enumerate(lines) if re.fullmatch(r"\w+:", line)]
    assert len(keys) == 6
    for k in keys:
        broken = [*lines[:k], lines[k].removesuffix(":"), *lines[k + 1 :]]
        found = _errors(tmp_path, "\n".join(broken))
        assert [problem.position.line for problem in found] == [k + 1], (broken[k], [str(p) for p in found])


# ---- what is no error, and what would take forever


def test_an_operator_that_is_listed_twice_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchgen takes such files, and backends have shipped them."""
    path = write(tmp_path, HEAD + "full_codegen:\n  - abs\n  - neg\n  - abs\nsupported:\n  - mm\n  - mm\n")
    assert [node.name for node in load_backend(path).nodes] == ["abs", "neg"]
    assert main(["-s", str(path), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "6:5: warning: abs is listed twice under full_codegen; first in line 4" in said
    assert "9:5: warning: mm is listed twice under supported; first in line 8" in said
    assert (tmp_path / "out" / "nodes.py").read_text().count("class Abs(") == 1
    assert main(["-s", str(write(tmp_path, path.read_text() + "  - nope\n")), "-o", str(tmp_path / "other")]) == 1
    assert "1 error; nothing was written" in capsys.readouterr().err


def test_thousands_of_mistakes(tmp_path: Path) -> None:
    """Near names are looked up for the first of them; for all of them, it would take minutes."""
    path = write(tmp_path, HEAD + "supported:\n" + "".join(f"  - add{k}.Tensr\n" for k in range(20_000)))
    with pytest.raises(BackendYamlError) as raised:
        load_backend(path)
    assert len(raised.value.problems) == 20_000
    assert "Did you mean" in str(raised.value.problems[0])


def test_aliases_that_multiply(tmp_path: Path) -> None:
    """Twelve levels of nine would be 282 billion entries."""
    lists = [f"x{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12)]
    maps = [f"y{k}: &b{k}\n  k{k}: 1\n  <<: [{', '.join([f'*b{k - 1}'] * 9)}]\n" for k in range(1, 12)]
    text = HEAD + "x0: &a0 [abs]\ny0: &b0 {k: 1}\n" + "".join(lists + maps) + "supported: *a11\n<<: *b11\n"
    with pytest.raises(BackendYamlError) as raised:
        load_backend(write(tmp_path, text))
    assert len(raised.value.problems) < 100
    assert "an entry of supported is a list" in str(raised.value)


@pytest.mark.parametrize("name", sorted(BUILT_IN_BACKENDS))
def test_a_backend_named_like_one_of_ours(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, HEAD + "supported:\n  - abs\n")
    assert main(["-s", str(path), "-o", str(tmp_path / "out"), "--backend-name", name]) == 1
    assert f"{name!r} is a backend that comes with tarry" in capsys.readouterr().err
    with pytest.raises(BackendError, match="tarry has a backend of that name"):
        tarry.register_backend(name, tarry.Backend)


def test_the_names_of_our_backends_are_all_there() -> None:
    assert frozenset(registry._BUILT_IN) == BUILT_IN_BACKENDS


def test_the_yaml_of_a_device_that_we_have_a_backend_for(tmp_path: Path) -> None:
    path = write(tmp_path, "backend: XLA\ncpp_namespace: torch_xla\nsupported:\n  - abs\n")
    assert main(["-s", str(path), "-o", str(tmp_path / "out"), "-q"]) == 0
    assert 'name = "torch_xla"' in (tmp_path / "out" / "backend.py").read_text()
