import contextlib
import io
import json
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

import programs
from kpt_serve.errors import PackageError
from kpt_serve.package.reading import LARGEST, read_program, scan
from programs import MODEL

WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"
# torch warns where it unpickles sample inputs in the way that runs code, and where it falls back to an old format.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return programs.clean(tmp_path_factory.mktemp("clean") / "model.pt2")


def test_a_program_with_weights_as_arguments_passes(clean):
    scan(clean)
    program = torch.export.load(io.BytesIO(read_program(clean)))
    x, weights = torch.randn(5, 4), {"layer.bias": torch.zeros(3), "layer.weight": torch.ones(3, 4)}
    twice, _ = program.module()(weights, x)
    torch.testing.assert_close(twice, x.sum(-1).repeat(2)[:, None].expand(10, 3))
    assert "Mul(Integer(2), Symbol(" in programs.entries(clean)[MODEL].decode()


def test_sizes_guards_branches_and_nothing_pass(tmp_path):
    shapes = ({0: Dim("b", min=6, max=64)}, {0: Dim.AUTO}, None, None)
    x = torch.ones(8, 4, dtype=torch.int64)
    path = programs.save(tmp_path / "model.pt2", programs.Choices(), x, x.clone(), None, True, shapes=shapes)
    program = json.loads(programs.entries(path)[MODEL])
    assert program["guards_code"]
    for word in ("FloorDiv", "Max", "higher_order.cond", "constant_input"):
        assert word in json.dumps(program)
    scan(path)


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def pickled(value):
    """Return what `torch.load` reads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_weights(source, target, marker):
    entry = {"path_name": "weight_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"layer.weight": entry}}).encode()
    content = programs.entries(source)
    programs.write(target, content | {WEIGHTS: config, "data/weights/weight_0": pickled(Touch(marker))})


def with_object(source, target, marker):
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"thing": entry}}).encode()
    content = programs.entries(source)
    data = pickle.dumps(Touch(marker))
    programs.write(target, content | {CONSTANTS: config, "data/constants/opaque_obj_0": data})


def with_samples(source, target, marker):
    programs.write(target, programs.entries(source) | {SAMPLES: pickled(((Touch(marker),), {}))})


def code(marker):
    return f"__import__('pathlib').Path('{marker}').touch()"


def graph(program):
    return program["graph_module"]["graph"]


def signature(program):
    return program["graph_module"]["module_call_graph"][0]["signature"]


def first_size(program):
    return graph(program)["tensor_values"]["x"]["sizes"][0]["as_expr"]


def with_expression(source, target, marker):
    programs.changed(source, target, lambda program: first_size(program).update(expr_str=code(marker)))


def with_nested_expression(source, target, marker):
    text = f'sympify("{code(marker)}")'
    programs.changed(source, target, lambda program: first_size(program).update(expr_str=text))


def with_name(source, target, marker):
    def change(program):
        text = (
            json.dumps(program)
            .replace('"name": "x"', f'"name": "x={code(marker)}"')
            .replace('"x": {', f'"x={code(marker)}": {{')
        )
        program.update(json.loads(text))

    programs.changed(source, target, change)


def with_argument_name(source, target, marker):
    # A text that is Python in the two places of a function's source where it is put.
    names = ["weights", f"x): pass\n{code(marker)}\ndef g(self):\n    '''#"]
    programs.changed(source, target, lambda program: signature(program).update(forward_arg_names=names))


def with_structure(source, target, marker):
    module = target.with_name("imported_by_a_structure.py")
    module.write_text(code(marker))
    context = {"default_factory_module": module.stem, "default_factory_name": "x", "dict_context": ["a", "b"]}
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": [leaf, leaf]}
    programs.changed(source, target, lambda program: signature(program).update(out_spec=json.dumps([1, tree])))


def with_enumeration(source, target, marker):
    target.with_name("imported_by_a_key.py").write_text(code(marker))
    key = [{"__enum__": True, "fqn": "imported_by_a_key:x", "name": "y"}, "b"]
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "builtins.dict", "context": json.dumps(key), "children_spec": [leaf, leaf]}
    programs.changed(source, target, lambda program: signature(program).update(out_spec=json.dumps([1, tree])))


ATTACKS = [
    with_weights,
    with_object,
    with_samples,
    with_expression,
    with_nested_expression,
    with_name,
    with_argument_name,
    with_structure,
    with_enumeration,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_would_run_code_is_refused(attack, clean, tmp_path, monkeypatch):
    path, marker = tmp_path / "model.pt2", tmp_path / "marker"
    attack(clean, path, marker)
    with pytest.raises(PackageError, match=r"model\.pt2: entry '(\w+/)?(data|models)/"):
        scan(path)
    assert not marker.exists()
    # The attack is one: without a scan, code of the file runs.
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.suppress(Exception):
        program = torch.export.load(path)
        program.module()({"layer.bias": torch.zeros(3), "layer.weight": torch.ones(3, 4)}, torch.ones(2, 4))
    assert marker.exists()


def test_weights_in_eight_bits_are_refused(tmp_path):
    from kpt_fp8 import convert_model_to_fp8

    model = convert_model_to_fp8(nn.Sequential(nn.Linear(64, 64)))
    path = programs.save(tmp_path / "model.pt2", model, torch.randn(4, 64))
    with pytest.raises(PackageError, match="none that KPT writes"):
        scan(path)


def test_a_tensor_subclass_is_refused_for_its_pickle(tmp_path, clean):
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    content = programs.entries(clean) | {WEIGHTS: json.dumps({"config": {"layer.weight": entry}}).encode()}
    with pytest.raises(PackageError, match=r"expected an empty list: torch\.export.load may unpickle weights"):
        scan(programs.write(tmp_path / "model.pt2", content))


@pytest.mark.parametrize(
    "name",
    [
        "data/weights/weight_0",
        "data/weights/model.pt",
        "data/constants/model.pt",
        "data/constants/tensor_0",
        "data/constants/custom_obj_0",
        "data/aotinductor/model/model.so",
        "data/sample_inputs/other.pt",
        "models/other.json",
        "extra/notes.txt",
        "version",
        "MODELS/Model.json",
    ],
)
def test_entries_that_kpt_does_not_write_are_refused(name, clean, tmp_path):
    path = programs.write(tmp_path / "model.pt2", programs.entries(clean) | {name: b"x"})
    with pytest.raises(PackageError, match=r"model\.pt2: entry '.+' is (none that KPT writes|there twice)"):
        scan(path)


@pytest.mark.parametrize("name", [MODEL, WEIGHTS, CONSTANTS, SAMPLES])
def test_a_missing_entry_is_named(name, clean, tmp_path):
    content = programs.entries(clean)
    del content[name]
    with pytest.raises(PackageError, match=f"has no entry '{name}'"):
        scan(programs.write(tmp_path / "model.pt2", content))


EVIL_SIZES = [
    "exec('x')",
    "sympify('1')",
    "S('1')",
    "parse_expr('1')",
    "Symbol('__import__(1)')",
    "Symbol('s0', **{})",
    "Symbol('s0').subs(1, 2)",
    "Symbol",
    "lambda: 1",
    "[1 for _ in s0]",
    "s0.__class__",
    "s0[0]",
    "f'{s0}'",
    "'s0'",
    "Float('inf')",
    "Integer('5')",
    "Integer(9)**Integer(9)**Integer(9)",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "Pow(Integer(9), Integer(999999999))",
    "Add(" * 2000 + "1" + ")" * 2000,
    "s0 if s1 else s2",
    "(s0 := 1)",
    "Add(*s0)",
    "Add(x=1)",
    "1; 2",
    "",
]


@pytest.mark.parametrize("text", EVIL_SIZES)
def test_sizes_are_names_numbers_and_known_functions(text, clean, tmp_path):
    path = programs.changed(clean, tmp_path / "model.pt2", lambda program: first_size(program).update(expr_str=text))
    with pytest.raises(PackageError, match=r"graph\.tensor_values\['x'\]\.sizes\[0\]\.as_expr\.expr_str is "):
        scan(path)


EVIL_GUARDS = [
    "exec('x')",
    "L['x'].__class__",
    "L['x'].size().pop()",
    "torch.os",
    "L['x'].size()[0] ** 9 ** 9 ** 9",
    '1 == 1, "") or exec("x',
    "L['x'].size()[0] <= 8\n",
    "max(L, key=L)",
    "(lambda: 1)()",
]


@pytest.mark.parametrize("text", EVIL_GUARDS)
def test_guards_compare_sizes(text, clean, tmp_path):
    path = programs.changed(clean, tmp_path / "model.pt2", lambda program: program["guards_code"].append(text))
    with pytest.raises(PackageError, match=r"guards_code\[0\] is "):
        scan(path)


def set_target(text):
    return lambda program: graph(program)["nodes"][0].update(target=text)


def set_key(text):
    def change(program):
        spec = signature(program)
        spec["in_spec"] = spec["in_spec"].replace("layer.bias", text)

    return change


FIELDS = [
    (set_target("torch.os.system"), "target"),
    (set_target("torch.load"), "target"),
    (set_target("torch.ops.aten.from_file.default"), "target"),
    (set_target("torch.ops.aten.save.default"), "target"),
    (set_target("torch.ops.aten.add.__class__"), "target"),
    (set_target("torch.ops.aten.__class__.mro"), "target"),
    (set_target("torch.ops.other.op.default"), "target"),
    (set_target("torch.ops.higher_order.print"), "target"),
    (set_target("_operator.methodcaller"), "target"),
    (set_target("#other"), "target"),
    (set_key("a' + x + '"), "in_spec"),
    (lambda program: program.update(schema_version={"major": 8, "minor": 21}), "schema"),
    (lambda program: program.update(schema_version={"major": 0, "minor": 0}), "schema"),
    (lambda program: program.update(torch_version="2.12.0"), "torch_version"),
    (lambda program: program.update(more=1), "more"),
    (lambda program: program.pop("range_constraints"), "range_constraints"),
    (lambda program: program.update(range_constraints={"exec()": {"min_val": 1, "max_val": 2}}), "range_constraints"),
    (lambda program: program.update(verifiers=["OTHER"]), "verifiers"),
    (lambda program: program.update(opset_version=3), "opset_version"),
    (lambda program: program["graph_module"].update(treespec_namedtuple_fields={"a": 1}), "treespec_namedtuple_fields"),
    (lambda program: graph(program).update(custom_obj_values={"a": {}}), "custom_obj_values"),
    (lambda program: graph(program)["inputs"].append({"as_custom_obj": {"name": "a", "class_fqn": "b"}}), "inputs"),
    (lambda program: graph(program)["inputs"].append({"as_operator": "torch.load"}), "as_operator"),
    (lambda program: graph(program)["inputs"].append({}), "inputs"),
    (lambda program: graph(program)["inputs"].append({"as_int": True}), "as_int"),
    (lambda program: graph(program)["nodes"][0].update(name="a b"), "name"),
    (lambda program: graph(program).update(nodes={}), "nodes"),
    (
        lambda program: program["graph_module"]["signature"]["input_specs"].append(
            {"parameter": {"arg": {"name": "a"}, "parameter_name": "a"}}
        ),
        "parameter",
    ),
]


@pytest.mark.parametrize(("change", "field"), FIELDS)
def test_a_field_that_is_not_what_torch_writes_is_named(change, field, clean, tmp_path):
    path = programs.changed(clean, tmp_path / "model.pt2", change)
    with pytest.raises(PackageError, match=rf"model\.pt2: entry 'models/model.json'.+{field}"):
        scan(path)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff\xfe{\0}\0", b"[" * 100_000, b"1" * 10_000])
def test_what_is_no_program_is_refused(text, clean, tmp_path):
    path = programs.write(tmp_path / "model.pt2", programs.entries(clean) | {MODEL: text})
    with pytest.raises(PackageError, match=r"model\.pt2"):
        scan(path)


def repacked(source, target, extra=(), **options):
    return programs.write(target, [*programs.entries(source).items(), *extra], **options)


def test_an_archive_by_another_writer_passes_if_it_ends_alike(clean, tmp_path):
    scan(repacked(clean, tmp_path / "model.pt2"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compression": zipfile.ZIP_DEFLATED}, "is compressed"),
        ({"extra": [("../evil", b"")]}, "leads out of the archive"),
        ({"extra": [("/evil", b"")]}, "leads out of the archive"),
        ({"extra": [("a/../b", b"")]}, "leads out of the archive"),
        ({"extra": [("folder/", b"")]}, "leads out of the archive"),
        ({"extra": [("a\\b", b"")]}, "no plain name"),
        ({"extra": [("a\nb", b"")]}, "no plain name"),
        ({"extra": [(MODEL, b"{}")]}, "is there twice"),
        ({"extra": [(MODEL.upper(), b"{}")]}, "is there twice"),
        ({"change": lambda info: setattr(info, "external_attr", 0o120777 << 16)}, "is a link"),
    ],
)
def test_tricks_of_archives_are_refused(options, sentence, clean, tmp_path):
    path = repacked(clean, tmp_path / "model.pt2", **options)
    with pytest.raises(PackageError, match=rf"(?s)model\.pt2: entry .+{sentence}"):
        scan(path)


def test_encrypted_entries_are_refused(clean, tmp_path):
    content = bytearray(repacked(clean, tmp_path / "model.pt2").read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "model.pt2").write_bytes(content)
    with pytest.raises(PackageError, match="is encrypted"):
        scan(tmp_path / "model.pt2")


@pytest.mark.parametrize("around", ["before", "after", "comment"])
def test_nothing_may_stand_around_the_archive(around, clean, tmp_path):
    content = clean.read_bytes()
    if around == "comment":
        content = content[:-2] + struct.pack("<H", 3) + b"abc"
    else:
        content = b"#!/bin/sh\n" + content if around == "before" else content + b"\n"
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with pytest.raises(PackageError, match=r"does not end as torch|is truncated"):
        scan(path)


def test_a_second_directory_is_refused(clean, tmp_path):
    """torch reads the directory at the address that the end gives, Python the one before it."""
    content = bytearray(clean.read_bytes())
    struct.pack_into("<Q", content, len(content) - 42 + 8, 0)
    (tmp_path / "model.pt2").write_bytes(content)
    with pytest.raises(PackageError, match="does not end as torch"):
        scan(tmp_path / "model.pt2")


def test_a_large_file_is_not_read(clean, tmp_path):
    path = shutil.copy(clean, tmp_path / "model.pt2")
    with open(path, "r+b") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(PackageError, match=f"has {LARGEST + 1} bytes"):
        scan(path)


@pytest.mark.parametrize("make", ["nothing", "folder", "empty", "text"])
def test_what_is_no_archive_is_told(make, tmp_path):
    path = tmp_path / "model.pt2"
    if make == "folder":
        path.mkdir()
    elif make != "nothing":
        path.write_text("" if make == "empty" else "a program" * 50)
    with pytest.raises(PackageError, match=r"model\.pt2"):
        scan(path)


def test_damage_is_told_in_a_sentence_wherever_it_is(clean, tmp_path):
    content, before = clean.read_bytes(), programs.entries(clean)
    path = tmp_path / "model.pt2"
    step = max(1, len(content) // 60)
    places = sorted({*range(0, len(content), step), *range(len(content) - 98, len(content), 4), *range(0, 60, 3)})
    for place in places:
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]):
            path.write_bytes(damaged)
            told = ""
            try:
                scan(path)
            except PackageError as error:
                told = str(error)
            if "model.pt2" not in told:
                assert programs.entries(path) == before, f"a changed byte at {place} passed"
    assert len(places) > 50


def test_scanning_imports_no_torch(clean):
    program = (
        "import sys; from kpt_serve.package.reading import scan; scan(sys.argv[1]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(clean)], check=True)
