import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from kpt_serve.errors import PackageError
from kpt_serve.package import manifest as module
from kpt_serve.package.checking import check, check_machine
from kpt_serve.package.manifest import (
    NAME,
    Dimension,
    Distribution,
    Manifest,
    RequiredOp,
    Tensor,
    Tolerance,
    describe_file,
)

FILES = {"model.pt2": b"a program", "model.safetensors": b"weights" * 40, "README.md": b"# toy\n", "empty": b""}
INSTALLED = {"torch": "2.13.0+cpu", "kpt-core": "0.1.3", "kpt-moe": "0.1.0"}


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "toy"
    package.mkdir()
    for name, content in FILES.items():
        (package / name).write_bytes(content)
    return package


@pytest.fixture
def manifest(folder):
    found = Manifest(
        name="toy",
        kind="program",
        inputs=(Tensor("x", "FP32", (-1, 4, -1), (Dimension(0, 1, 64), Dimension(2, 0))),),
        outputs=(Tensor("y", "BF16", (8,)),),
        ops=(RequiredOp("moe.experts", "kpt-moe", ">=0.1,<0.2"),),
        device_types=("cpu", "cuda"),
        dtypes=("float32", "float8_e4m3fn"),
        distributions=(Distribution("torch", "==2.13.*"), Distribution("kpt-core", ">=0.1,<0.2")),
        tolerance=Tolerance(1.1, 2.0),
        files=tuple(describe_file(folder, name) for name in FILES),
    )
    found.write(folder)
    return found


def test_a_manifest_that_was_written_is_read_again(folder, manifest):
    assert Manifest.read(folder) == manifest
    assert Manifest.parse(manifest.as_dict()) == manifest
    assert list(json.loads((folder / NAME).read_text()))[:2] == ["format", "name"]
    check(folder, manifest)
    (folder / "model.sig").write_text("made after the manifest")
    check(folder, manifest)


def test_a_wrong_manifest_is_not_written(folder, manifest):
    before = (folder / NAME).read_bytes()
    with pytest.raises(PackageError, match=r"'name' is '\.\./x'; expected a plain name"):
        replace(manifest, name="../x").write(folder)
    assert (folder / NAME).read_bytes() == before


def put(*path_and_value):
    """Return a change of a document: the value at a path of keys."""
    *path, last, value = path_and_value

    def change(document):
        for key in path:
            document = document[key]
        document[last] = value

    return change


def drop(*path):
    *path, last = path

    def change(document):
        for key in path:
            document = document[key]
        del document[last]

    return change


def again(key):
    return lambda document: document[key].append(document[key][0])


def file(path):
    return put("files", 0, "path", path)


TENSOR = ("inputs", 0)
MALFORMED = [
    *((drop(key), key) for key in ("format", "name", "kind", "inputs", "outputs", "ops", "device_types", "dtypes")),
    *((drop(key), key) for key in ("distributions", "tolerance", "files")),
    *((drop(*TENSOR, key), key) for key in ("name", "datatype", "shape", "dynamic")),
    *((drop("ops", 0, key), key) for key in ("name", "distribution", "versions")),
    *((drop("files", 0, key), key) for key in ("path", "size", "sha256")),
    (put("more", 1), "more"),
    (put(*TENSOR, "more", 1), "more"),
    (put("ops", 0, "more", 1), "more"),
    (put("distributions", 0, "more", 1), "more"),
    (put("files", 0, "more", 1), "more"),
    (put("tolerance", "more", 1), "more"),
    (put(*TENSOR, "dynamic", 0, "more", 1), "more"),
    (put("format", 2), "format"),
    (put("format", True), "format"),
    (put("format", "1"), "format"),
    (put("format", 1.0), "format"),
    (put("name", ""), "name"),
    (put("name", "a/b"), "name"),
    (put("name", None), "name"),
    (put("kind", "onnx"), "kind"),
    (put("kind", ["program"]), "kind"),
    (put("inputs", {}), "inputs"),
    (put("inputs", [1]), "inputs"),
    (again("inputs"), "inputs"),
    (put(*TENSOR, "name", 3), "name"),
    (put(*TENSOR, "name", "a\nb"), "name"),
    (put(*TENSOR, "datatype", "FP8"), "datatype"),
    (put(*TENSOR, "datatype", []), "datatype"),
    (put(*TENSOR, "shape", [4, -2]), "shape"),
    (put(*TENSOR, "shape", [4, True]), "shape"),
    (put(*TENSOR, "shape", [4.0]), "shape"),
    (put(*TENSOR, "shape", "4"), "shape"),
    (put(*TENSOR, "shape", [-1, 4, 4]), "dynamic"),
    (put(*TENSOR, "shape", [-1, -1, -1]), "dynamic"),
    (put(*TENSOR, "dynamic", []), "dynamic"),
    (put(*TENSOR, "dynamic", 0, "min", -1), "dynamic"),
    (put(*TENSOR, "dynamic", 0, "max", 0), "dynamic"),
    (put(*TENSOR, "dynamic", 0, "max", "64"), "max"),
    (put(*TENSOR, "dynamic", 0, "axis", 2), "dynamic"),
    (again("ops"), "ops"),
    (put("ops", 0, "name", "a b"), "name"),
    (put("ops", 0, "versions", "0.1"), "versions"),
    (put("ops", 0, "versions", ""), "versions"),
    (put("distributions", 0, "versions", 2), "versions"),
    (put("distributions", 0, "name", "torch @ http://x"), "name"),
    (again("distributions"), "distributions"),
    (put("device_types", "cpu"), "device_types"),
    (again("device_types"), "device_types"),
    (put("dtypes", [8]), "dtypes"),
    (put("tolerance", 1.1), "tolerance"),
    (put("tolerance", "mean", 0.9), "mean"),
    (put("tolerance", "max", "2"), "max"),
    (put("tolerance", "max", True), "max"),
    (again("files"), "files"),
    (put("files", 0, "size", -1), "size"),
    (put("files", 0, "size", 1.5), "size"),
    (put("files", 0, "sha256", "0" * 63), "sha256"),
    (put("files", 0, "sha256", "A" * 64), "sha256"),
    *((file(path), "path") for path in ("/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\\b", "", ".", "..", "x\n")),
    *((file(path), "path") for path in ("folder/x", ".hidden", "~/x", "C:/x", "a.", NAME, "model.sig", 3, None, [1])),
]


@pytest.mark.parametrize(("change", "key"), MALFORMED)
def test_a_malformed_manifest_names_the_key(change, key, folder, manifest):
    document = manifest.as_dict()
    change(document)
    (folder / NAME).write_text(json.dumps(document))
    with pytest.raises(PackageError, match=rf"{NAME}.*'{key}'"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        '"text"',
        '{"format": 1',
        '{"format": 1, "format": 1}',
        '{"format": NaN}',
        "[" * 100_000,
        "1" * 10_000,
        '{"format": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_what_is_no_manifest_is_told(text, folder):
    (folder / NAME).write_text(text)
    with pytest.raises(PackageError, match=NAME):
        Manifest.read(folder)


def test_other_bytes_links_and_large_files_are_no_manifest(folder, manifest, monkeypatch):
    path = folder / NAME
    content = path.read_bytes()
    path.write_bytes(b"\xff" + content)
    with pytest.raises(PackageError, match="is no manifest"):
        Manifest.read(folder)
    path.write_bytes(content)
    monkeypatch.setattr(module, "LARGEST", 10)
    with pytest.raises(PackageError, match="a manifest has at most 10"):
        Manifest.read(folder)
    path.unlink()
    with pytest.raises(PackageError, match="can't be read: No such file"):
        Manifest.read(folder)
    with pytest.raises(PackageError, match="can't be read"):
        Manifest.read(folder / "nothing")
    path.symlink_to(folder / "model.pt2")
    with pytest.raises(PackageError, match="no plain file"):
        Manifest.read(folder)


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
@pytest.mark.parametrize("where", [0, -1])
def test_a_changed_byte_is_told(name, where, folder, manifest):
    content = bytearray(FILES[name])
    content[where] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(PackageError, match=rf"file '{name}' was changed: its SHA-256 is"):
        check(folder, manifest)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_a_longer_and_a_truncated_file_are_told(name, folder, manifest):
    path = folder / name
    if FILES[name]:
        path.write_bytes(FILES[name][:-1])
        with pytest.raises(PackageError, match=rf"file '{name}' is truncated: it has {len(FILES[name]) - 1} bytes"):
            check(folder, manifest)
    path.write_bytes(FILES[name] + b"x")
    with pytest.raises(PackageError, match=rf"file '{name}' was changed: it has {len(FILES[name]) + 1} bytes"):
        check(folder, manifest)
    path.unlink()
    with pytest.raises(PackageError, match=rf"file '{name}' is missing"):
        check(folder, manifest)
    shutil.copy(folder / "README.md", path) if name != "README.md" else path.mkdir()
    with pytest.raises(PackageError, match=rf"file '{name}' (was changed|is truncated|is missing)"):
        check(folder, manifest)


@pytest.mark.parametrize("name", ["evil.py", ".hidden", "folder/evil.py", "README.MD", "model.sig.bak"])
def test_an_added_file_is_told(name, folder, manifest):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    with pytest.raises(PackageError, match=rf"file '{name}' was added"):
        check(folder, manifest)


def test_links_and_pipes_are_refused_though_their_content_is_right(folder, manifest, tmp_path):
    path = folder / "model.pt2"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match=r"'model.pt2' is a link"):
        check(folder, manifest)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PackageError, match=r"'model.pt2' is no plain file"):
        check(folder, manifest)
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    check(folder, manifest)
    (folder / "folder").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(PackageError, match=r"'folder' is a link"):
        check(folder, manifest)


def test_a_folder_of_transformers_has_folders(folder, manifest):
    (folder / "original").mkdir()
    (folder / "original/params.json").write_text("{}")
    files = (*manifest.files, describe_file(folder, "original/params.json"))
    found = replace(manifest, kind="transformers", files=files)
    found.write(folder)
    check(folder, Manifest.read(folder))
    (folder / "original/params.json").write_text("[]")
    with pytest.raises(PackageError, match=r"file 'original/params.json' was changed"):
        check(folder, found)
    for path in ("original/../../x", "/x", "original//x", "original/.", "original/"):
        with pytest.raises(PackageError, match="a path inside the folder"):
            Manifest.parse(replace(found, files=(replace(files[0], path=path),)).as_dict())


def test_a_machine_that_has_everything_passes(manifest):
    check_machine(manifest, device_type="cpu", versions=INSTALLED)
    check_machine(manifest, device_type="cuda", capabilities={"float32", "float8_e4m3fn", "sm90"}, versions=INSTALLED)


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"torch": "2.12.1"}, "toy was exported by torch 2.13; 2.12 reads other files: install torch==2.13.*"),
        ({"torch": "2.14.0.dev20261101"}, "toy was exported by torch 2.13; 2.14 reads other files"),
        ({"torch": None}, "toy needs torch ==2.13.*; it is not installed: pip install 'torch==2.13.*'"),
        ({"kpt-core": "0.2.0"}, "toy needs kpt-core >=0.1,<0.2; 0.2.0 is installed"),
        ({"kpt-moe": "0.3.0"}, "toy needs op moe.experts of kpt-moe >=0.1,<0.2; 0.3.0 is installed"),
        ({"kpt-moe": None}, "toy needs op moe.experts of kpt-moe >=0.1,<0.2; it is not installed"),
        ({"kpt-moe": "unknown"}, "toy needs op moe.experts of kpt-moe >=0.1,<0.2; unknown is installed"),
    ],
)
def test_a_version_outside_its_range_is_told(installed, told, manifest):
    versions = {name: found for name, found in (INSTALLED | installed).items() if found is not None}
    with pytest.raises(PackageError) as error:
        check_machine(manifest, device_type="cpu", versions=versions)
    assert str(error.value).startswith(told)


def test_a_device_and_a_dtype_that_are_not_there_are_told(manifest):
    with pytest.raises(PackageError, match=r"toy runs on cpu, cuda; got 'xla'"):
        check_machine(manifest, device_type="xla", versions=INSTALLED)
    with pytest.raises(PackageError, match=r"needs float8_e4m3fn, which no kernel serves on cuda \(there is"):
        check_machine(manifest, device_type="cuda", capabilities={"sm80", "float32"}, versions=INSTALLED)


def test_what_is_installed_here_is_looked_up(manifest):
    found = replace(manifest, ops=(), distributions=(Distribution("packaging", ">=24"),))
    check_machine(found, device_type="cpu")
    with pytest.raises(PackageError, match="needs no-such-distribution >=1; it is not installed"):
        check_machine(replace(found, distributions=(Distribution("no-such-distribution", ">=1"),)), device_type="cpu")


def test_all_of_it_is_before_torch(folder, manifest):
    program = """
import sys
from kpt_serve.package.checking import check, check_machine
from kpt_serve.package.manifest import Manifest
manifest = Manifest.read(sys.argv[1])
check(sys.argv[1], manifest)
check_machine(manifest, device_type="cpu")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
