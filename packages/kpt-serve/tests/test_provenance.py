"""The card, the bill of materials and the signature of a package: what vouches for it to others."""

import base64
import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest

from kpt_serve.package import (
    Dimension,
    Distribution,
    Manifest,
    PackageError,
    RequiredOp,
    Tensor,
    Tolerance,
    check,
    describe_file,
    sign,
    verify_signature,
    write_card,
    write_sbom,
)

FILES = {"model.pt2": b"a program", "model.safetensors": b"weights" * 40, "golden.safetensors": b"golden"}


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
        inputs=(Tensor("x", "FP32", (-1, 4, -1), (Dimension(0, 1, 64), Dimension(2, 0))), Tensor("step", "INT64", ())),
        outputs=(Tensor("y", "BF16", (8,)),),
        ops=(RequiredOp("moe.experts", "kpt-moe", ">=0.1,<0.2"),),
        device_types=("cpu", "cuda"),
        dtypes=("float32",),
        distributions=(Distribution("torch", "==2.13.*"), Distribution("kpt-core", ">=0.1,<0.2")),
        tolerance=Tolerance(1.1, 2.0),
        files=tuple(describe_file(folder, name) for name in FILES),
    )
    found.write(folder)
    return found


def test_a_card_says_what_the_manifest_says(folder, manifest):
    hub = pytest.importorskip("huggingface_hub")
    path = write_card(folder, manifest, errors={"y": (1.25e-7, 9.5e-7)})
    assert path == folder / "README.md"
    card = hub.ModelCard.load(path)
    assert card.data.to_dict() == {"library_name": "kpt-serve", "tags": ["kpt", "pytorch", "torch.export"]}
    for line in (
        "# toy",
        "It runs on cpu, cuda, and computes in float32.",
        "- `x`: FP32, shape (1 to 64) x 4 x (0 or more)",
        "- `step`: INT64, one value",
        "- `y`: BF16, shape 8",
        "- torch `==2.13.*`",
        "- op `moe.experts` of kpt-moe `>=0.1,<0.2`",
        "- `y`: mean error 1.25e-07, largest 9.5e-07",
        "$ kpt export --verify toy",
    ):
        assert line in card.text.splitlines()
    assert "at most 1.1 times the\nexporter's, and the largest at most 2 times" in card.text
    before = path.read_bytes()
    assert write_card(folder, manifest, errors={"y": (1.25e-7, 9.5e-7)}).read_bytes() == before


def test_the_card_of_a_folder_of_transformers_leaves_its_own_alone(folder, manifest):
    hub = pytest.importorskip("huggingface_hub")
    own = b"---\r\nlicense: mit\r\n---\r\n# Theirs\r\n"
    (folder / "README.md").write_bytes(own)
    path = write_card(folder, replace(manifest, kind="transformers", name="a model"))
    assert path == folder / "KPT.md"
    assert (folder / "README.md").read_bytes() == own
    card = hub.ModelCard.load(path)
    assert card.data.library_name == "transformers"
    assert "$ kpt export --verify 'a model'\n" in card.text
    assert "mean error 1" not in card.text


def test_a_bill_of_materials_is_valid_and_names_files_and_distributions(folder, manifest):
    pytest.importorskip("cyclonedx")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    path = write_sbom(folder, manifest)
    assert path == folder / "sbom.cdx.json"
    text = path.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    model = document["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "toy")
    hashes = {each["name"]: each["hashes"] for each in model["components"]}
    assert hashes == {
        file.path: [{"alg": "SHA-256", "content": file.sha256}]
        for file in manifest.files
        if file.path != "golden.safetensors"
    }
    found = {each["name"]: each for each in document["components"]}
    assert sorted(found) == ["kpt-core", "kpt-moe", "torch"]
    for name, component in found.items():
        version = metadata.version(name)
        assert component["version"] == version
        assert component["purl"] == f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    assert found["kpt-core"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert "BSD-3-Clause" in str(found["torch"]["licenses"])
    (depends,) = [each["dependsOn"] for each in document["dependencies"] if each["ref"] == "model"]
    assert depends == sorted(each["purl"] for each in document["components"])


def test_a_bill_of_materials_changes_with_its_contents_alone(folder, manifest, monkeypatch):
    pytest.importorskip("cyclonedx")
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first = write_sbom(folder, manifest).read_text()
    assert "timestamp" not in first
    with_it = (*manifest.files, describe_file(folder, "sbom.cdx.json"))
    again = replace(manifest, files=with_it, distributions=manifest.distributions[::-1])
    assert write_sbom(folder, again).read_text() == first
    (folder / "model.pt2").write_bytes(b"another")
    other = replace(manifest, files=(describe_file(folder, "model.pt2"), *manifest.files[1:]))
    assert json.loads(write_sbom(folder, other).read_text())["serialNumber"] != json.loads(first)["serialNumber"]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    dated = json.loads(write_sbom(folder, manifest).read_text())
    assert dated["metadata"]["timestamp"] == "1970-01-02T00:00:00+00:00"
    for wrong in ("yesterday", "1e9", "9" * 40):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(PackageError, match=f"SOURCE_DATE_EPOCH is '{wrong}'; expected seconds since 1970"):
            write_sbom(folder, manifest)


def test_a_bill_of_materials_needs_what_it_names(folder, manifest):
    pytest.importorskip("cyclonedx")
    absent = replace(manifest, distributions=(Distribution("no-such-distribution", ">=1"),))
    with pytest.raises(PackageError, match="toy needs no-such-distribution, which is not installed"):
        write_sbom(folder, absent)


@pytest.mark.parametrize(
    ("fields", "licences"),
    [
        ("License-Expression: MIT OR Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
        ("License: MIT", [{"license": {"id": "MIT"}}]),
        ("License: Apache 2.0 License", [{"license": {"name": "Apache 2.0 License"}}]),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: X", [{"license": {"name": "X"}}]),
        (
            f"License: {'long ' * 40}\nClassifier: License :: OSI Approved :: B\nClassifier: License :: A",
            [{"license": {"name": "A"}}, {"license": {"name": "B"}}],
        ),
        ("Classifier: Typing :: Typed", None),
    ],
)
def test_a_licence_is_what_the_metadata_say(fields, licences, folder, manifest, tmp_path, monkeypatch):
    pytest.importorskip("cyclonedx")
    written = tmp_path / "thing-1.0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.4\nName: thing\nVersion: 1.0\n{fields}\n")
    monkeypatch.syspath_prepend(tmp_path)
    needing = replace(manifest, ops=(), distributions=(Distribution("thing", ">=1"),))
    (component,) = json.loads(write_sbom(folder, needing).read_text())["components"]
    assert component.get("licenses") == licences


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A private and a public key, as the line of openssl writes them that the documentation gives."""
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    place = tmp_path_factory.mktemp("keys")
    made = {"key": ec.SECP256R1(), "other": ec.SECP384R1(), "curve": ec.SECP256K1()}
    private = {name: ec.generate_private_key(curve) for name, curve in made.items()}
    for name, key in {**private, "edwards": ed25519.Ed25519PrivateKey.generate()}.items():
        public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (place / f"{name}.pub.pem").write_bytes(public)
        layout = form.PrivateFormat.PKCS8 if name == "edwards" else form.PrivateFormat.TraditionalOpenSSL
        (place / f"{name}.pem").write_bytes(key.private_bytes(form.Encoding.PEM, layout, form.NoEncryption()))
    locked = private["key"].private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret")
    )
    (place / "locked.pem").write_bytes(locked)
    (place / "garbage.pem").write_text("-----BEGIN NOTHING-----")
    return place


@pytest.fixture
def signed(folder, manifest, keys):
    assert sign(folder, keys / "key.pem") == folder / "model.sig"
    return folder


def test_a_signed_package_verifies_wherever_it_is(signed, manifest, keys, tmp_path, capfd):
    verify_signature(signed, keys / "key.pub.pem")
    check(signed, manifest)
    moved = signed.rename(tmp_path / "moved")
    verify_signature(moved, keys / "key.pub.pem")
    (tmp_path / "link").symlink_to(moved)  # as a mounted volume is
    verify_signature(tmp_path / "link", keys / "key.pub.pem")
    sign(moved, keys / "other.pem")  # the first signature is replaced, not signed
    verify_signature(moved, keys / "other.pub.pem")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [*FILES, "kpt-package.json"])
def test_a_file_changed_by_a_byte_is_told(name, signed, keys):
    content = bytearray((signed / name).read_bytes())
    content[-1] ^= 1
    (signed / name).write_bytes(content)
    with pytest.raises(PackageError, match=rf"file '{name}' was changed after the package was signed"):
        verify_signature(signed, keys / "key.pub.pem")


@pytest.mark.parametrize("name", ["evil.py", ".gitattributes", ".git/config", "folder/evil.py", "model.sig.bak"])
def test_a_file_added_after_the_signature_is_told(name, signed, keys):
    (signed / name).parent.mkdir(exist_ok=True)
    (signed / name).write_text("")
    with pytest.raises(PackageError, match=rf"file '{name}' was added after the package was signed"):
        verify_signature(signed, keys / "key.pub.pem")


def test_a_missing_file_and_a_link_are_told(signed, keys, tmp_path):
    (signed / "model.pt2").rename(tmp_path / "model.pt2")
    with pytest.raises(PackageError, match=r"file 'model.pt2' is missing; it was signed"):
        verify_signature(signed, keys / "key.pub.pem")
    (signed / "model.pt2").symlink_to(tmp_path / "model.pt2")
    with pytest.raises(PackageError, match=r"'model\.pt2' is a link or no plain file"):
        verify_signature(signed, keys / "key.pub.pem")
    with pytest.raises(PackageError, match=r"'model\.pt2' is a link or no plain file"):
        sign(signed, keys / "key.pem")


def test_another_key_and_a_missing_signature_are_told(signed, keys):
    with pytest.raises(PackageError, match=r"model.sig was made with another key than .*other.pub.pem"):
        verify_signature(signed, keys / "other.pub.pem")
    (signed / "model.sig").unlink()
    with pytest.raises(PackageError, match=r"model.sig is missing: the package is not signed"):
        verify_signature(signed, keys / "key.pub.pem")


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[]", b"null", b"[" * 100_000])
def test_garbage_is_no_signature(content, signed, keys):
    (signed / "model.sig").write_bytes(content)
    with pytest.raises(PackageError, match=r"model.sig is no signature of a key"):
        verify_signature(signed, keys / "key.pub.pem")


def test_a_forged_signature_is_told(signed, keys):
    path = signed / "model.sig"
    bundle = json.loads(path.read_text())
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    (signed / "model.pt2").write_bytes(b"evil")
    evil = describe_file(signed, "model.pt2").sha256
    honest = next(
        each["digest"] for each in json.loads(payload)["predicate"]["resources"] if each["name"] == "model.pt2"
    )
    forged = payload.replace(honest.encode(), evil.encode())
    for change, told in (
        ({"payload": base64.b64encode(forged).decode()}, r"model\.sig was changed, or forged"),
        (
            {"signatures": [{"sig": base64.b64encode(b"none").decode(), "keyid": ""}]},
            r"model\.sig was changed, or forged",
        ),
        ({"signatures": []}, r"model\.sig is no signature of a key: IndexError"),
        ({"payloadType": "text/plain"}, r"model\.sig is no signature of a key: .*text/plain"),
    ):
        path.write_text(json.dumps({**bundle, "dsseEnvelope": {**envelope, **change}}))
        with pytest.raises(PackageError, match=told):
            verify_signature(signed, keys / "key.pub.pem")
    (signed / "model.pt2").write_bytes(FILES["model.pt2"])
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    path.write_text(json.dumps(bundle))
    with pytest.raises(PackageError, match="no signature of a key"):
        verify_signature(signed, keys / "key.pub.pem")


def test_a_signature_leaves_no_file_out(folder, manifest, keys):
    from model_signing import hashing, signing

    def sign_without(*names, **options):
        left_out = hashing.Config().set_ignored_paths(paths=["model.sig", *names], **options)
        signer = signing.Config().use_elliptic_key_signer(private_key=keys / "key.pem")
        signer.set_hashing_config(left_out).sign(folder, folder / "model.sig")

    sign_without()  # as the library's own command does
    verify_signature(folder, keys / "key.pub.pem")
    (folder / ".gitattributes").write_text("")
    with pytest.raises(PackageError, match=r"leaves out '.gitattributes'"):
        verify_signature(folder, keys / "key.pub.pem")
    for names in (["model.pt2", ".gitattributes"], ["."]):
        sign_without(*names, ignore_git_paths=False)
        with pytest.raises(PackageError, match=r"leaves out '(model.pt2|.gitattributes|.)'"):
            verify_signature(folder, keys / "key.pub.pem")


def test_the_command_of_model_signing_verifies_it_too(signed, keys):
    from model_signing import verifying

    verifying.Config().use_elliptic_key_verifier(public_key=keys / "key.pub.pem").verify(signed, signed / "model.sig")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("garbage.pem", "is no private elliptic key"),
        ("key.pub.pem", "is no private elliptic key"),
        ("curve.pem", "is no private elliptic key"),
        ("edwards.pem", "is no private elliptic key"),
        ("locked.pem", "has a password; expected a private key without one"),
        ("nothing.pem", "can't be read: No such file or directory; make a private key: openssl ecparam"),
    ],
)
def test_what_is_no_private_key_is_told(key, told, folder, manifest, keys):
    with pytest.raises(PackageError, match=f"{key} {told}"):
        sign(folder, keys / key)
    assert not (folder / "model.sig").exists()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        *((f"{name}.pem", "is no public elliptic key") for name in ("garbage", "key", "curve")),
        *((f"{name}.pub.pem", "is no public elliptic key") for name in ("edwards", "curve")),
        ("nothing.pem", "can't be read: No such file or directory; expected a public key"),
    ],
)
def test_what_is_no_public_key_is_told(key, told, signed, keys):
    with pytest.raises(PackageError, match=f"{key} {told}"):
        verify_signature(signed, keys / key)


def test_a_private_key_in_the_package_and_another_folder_are_refused(folder, manifest, keys, tmp_path):
    (folder / "key.pem").write_bytes((keys / "key.pem").read_bytes())
    with pytest.raises(PackageError, match=r"key.pem lies in the package"):
        sign(folder, folder / "key.pem")
    with pytest.raises(PackageError, match=r"kpt-package.json can't be read"):
        sign(tmp_path, keys / "key.pem")


@pytest.mark.parametrize(
    ("library", "call", "extra"),
    [
        ("huggingface_hub", write_card, "card"),
        ("jinja2", write_card, "card"),
        ("cyclonedx.model", write_sbom, "sbom"),
        ("model_signing.hashing", sign, "sign"),
        ("OpenSSL", sign, "sign"),
        ("OpenSSL", verify_signature, "sign"),
    ],
)
def test_a_missing_library_names_the_extra(library, call, extra, folder, manifest, monkeypatch, request):
    second = manifest
    if extra == "sign":
        keys = request.getfixturevalue("keys")
        sign(folder, keys / "key.pem")
        second = keys / ("key.pem" if call is sign else "key.pub.pem")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PackageError, match=rf"needs {library}: pip install 'kpt-serve\[{extra}\]'"):
        call(folder, second)


def test_openssl_makes_keys_that_sign(folder, manifest, tmp_path):
    pytest.importorskip("model_signing")
    for line in (
        "openssl ecparam -name prime256v1 -genkey -noout -out key.pem",
        "openssl ec -in key.pem -pubout -out key.pub.pem",
    ):
        try:
            subprocess.run(line.split(), cwd=tmp_path, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not installed")
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    sign(folder, tmp_path / "key.pem")
    verify_signature(folder, tmp_path / "key.pub.pem")
