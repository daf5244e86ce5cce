"""What runs a package in containers: each field that matters, for each way to serve."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from kpt_serve.errors import PackageError
from kpt_serve.manifests import FILES, KUBERNETES, write_manifests
from kpt_serve.package import Distribution, Manifest, RequiredOp, Tolerance
from kpt_serve.package.manifest import File

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[3] / "deploy" / "kubernetes" / "toy"
GIB = 1 << 30

#: How packages differ, and how they are served.
VARIANTS = {
    "program": ({}, {}),
    "signed": ({"signed": True}, {}),
    "cuda": ({"device_types": ("cpu", "cuda"), "weights": 3 * GIB}, {}),
    "cpu of two": ({"device_types": ("cpu", "cuda")}, {"device_type": "cpu"}),
    "rocm": ({"device_types": ("cuda",)}, {"device_type": "rocm", "base": "rocm/pytorch:rocm7.1"}),
    "openai": ({"kind": "transformers"}, {"openai": True}),
    "openai, signed, cuda": ({"kind": "transformers", "signed": True, "device_types": ("cuda",)}, {"openai": True}),
}


def make_package(
    folder, *, name="toy", kind="program", device_types=("cpu",), weights=100 << 20, signed=False, needs=(), ops=None
):
    """Write a manifest, which is all of a package that is read here."""
    folder.mkdir()
    ops = (RequiredOp("moe.experts", "kpt-moe", ">=0.1,<0.2"),) if ops is None else ops
    Manifest(
        name=name,
        kind=kind,
        inputs=(),
        outputs=(),
        ops=ops,
        device_types=device_types,
        dtypes=("float32",),
        distributions=(Distribution("kpt-core", ">=0.1,<0.2"), Distribution("torch", "==2.13.*"), *needs),
        tolerance=Tolerance(2.0, 4.0),
        files=(File("model.safetensors", weights, "0" * 64), File("golden.safetensors", GIB, "0" * 64)),
    ).write(folder)
    if signed:
        (folder / "model.sig").write_text("{}")
    return folder


def documents(file):
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(file.read_text()))


class Written:
    """The files, parsed."""

    def __init__(self, folder):
        self.folder = folder
        self.containerfile = (folder / "Containerfile").read_text()
        self.deployment, self.service, self.budget, self.scaler = (documents(folder / name)[0] for name in KUBERNETES)
        self.runtime, self.inference = documents(folder / "kserve.yaml")
        self.pod = self.deployment["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        (self.kserve,) = self.runtime["spec"]["containers"]
        self.command = self.container["command"]


@pytest.fixture
def write(tmp_path):
    def make(options=None, **kwargs):
        package = make_package(tmp_path / "package", **kwargs)
        assert write_manifests(package, tmp_path / "out", **{"image": "REGISTRY/toy:1", **(options or {})}) == FILES
        return Written(tmp_path / "out")

    return make


@pytest.fixture(params=VARIANTS)
def written(request, write):
    kwargs, options = VARIANTS[request.param]
    return write(options, **kwargs)


def test_the_files_are_these_and_the_kustomization_lists_kubernetes_own(written):
    assert {path.name for path in written.folder.iterdir()} == {*FILES}
    (kustomization,) = documents(written.folder / "kustomization.yaml")
    assert kustomization["resources"] == [*KUBERNETES]
    assert [each["kind"] for each in (written.deployment, written.service, written.budget, written.scaler)] == [
        *("Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler")
    ]


def test_a_pod_may_do_little(written):
    for pod, container in ((written.pod, written.container), (written.inference["spec"]["predictor"], written.kserve)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    assert re.search(r"^USER 65532:65532$", written.containerfile, re.M)


def test_a_pod_drains_within_its_time(written):
    seconds = [int(written.command[written.command.index(option) + 1][:-1]) for option in ("--settle", "--grace")]
    assert seconds == [10, 30]
    assert written.pod["terminationGracePeriodSeconds"] == 45
    assert written.inference["spec"]["predictor"]["terminationGracePeriodSeconds"] == 45
    assert written.deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert written.budget["spec"]["maxUnavailable"] == 1


def test_labels_names_and_ports_fit_each_other(written):
    labels = {"app.kubernetes.io/name": "toy"}
    template = written.deployment["spec"]["template"]
    assert template["metadata"]["labels"] == labels
    for selector in (written.deployment["spec"]["selector"], written.budget["spec"]["selector"]):
        assert selector == {"matchLabels": labels}
    assert written.service["spec"]["selector"] == labels
    assert written.scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "toy"}
    ports = {each["name"]: each["containerPort"] for each in written.container["ports"]}
    assert {each["targetPort"] for each in written.service["spec"]["ports"]} == {*ports}
    assert str(ports["http"]) == written.command[written.command.index("--port") + 1]
    if "grpc" in ports:
        assert str(ports["grpc"]) == written.command[written.command.index("--grpc-port") + 1]
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "8080",
        "prometheus.io/path": "/metrics",
    }
    assert written.runtime["spec"]["annotations"] == template["metadata"]["annotations"]
    model = written.inference["spec"]["predictor"]["model"]
    assert model["storageUri"] == "oci://REGISTRY/toy:1"
    assert model["runtime"] == written.runtime["metadata"]["name"] == "toy"
    assert written.runtime["spec"]["supportedModelFormats"][0]["name"] == model["modelFormat"]["name"]
    assert written.runtime["spec"]["multiModel"] is False


def test_the_token_comes_from_a_secret_and_no_value_is_written(written):
    for container in (written.container, written.kserve):
        token, threads = container["env"]
        assert token == {"name": "KPT_TOKEN", "valueFrom": {"secretKeyRef": {"name": "toy-token", "key": "token"}}}
        assert threads["name"] == "OMP_NUM_THREADS"
    assert not any("kind: Secret" in path.read_text() for path in written.folder.iterdir())


def test_the_command_is_the_same_everywhere_and_kpt_serve_knows_its_options(written):
    from typer.testing import CliRunner

    kpt_cli = pytest.importorskip("kpt_cli.main", reason="the command is kpt-cli's")
    assert json.loads(written.containerfile.splitlines()[-1].removeprefix("ENTRYPOINT ")) == written.command
    shell, option, script = written.kserve["command"]
    assert (shell, option) == ("/bin/sh", "-c")
    assert script.endswith(
        f'exec kpt serve "$(readlink /mnt/models || echo /mnt/models)" {" ".join(written.command[3:])}'
    )
    done = CliRunner().invoke(kpt_cli.app, [*written.command[1:], "--help"])
    assert (done.exit_code, written.command[:3]) == (0, ["kpt", "serve", "/models"])
    # --help comes before options are known; these are all of them.
    options = {each for each in written.command if each.startswith("--")}
    assert options <= set(re.findall(r"--[a-z-]+", CliRunner().invoke(kpt_cli.app, ["serve", "--help"]).stdout))


def test_a_program_is_probed_and_served_by_open_inference(write):
    made = write()
    assert made.container["startupProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert made.container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert made.container["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    assert made.runtime["spec"]["protocolVersions"] == ["v2"]
    assert made.inference["spec"]["predictor"]["model"]["protocolVersion"] == "v2"
    assert "--openai" not in made.command
    assert made.scaler["spec"]["metrics"][0]["resource"]["name"] == "cpu"


def test_a_language_model_is_probed_and_served_by_openais_api(write):
    made = write({"openai": True}, kind="transformers")
    assert made.container["startupProbe"]["httpGet"]["path"] == "/ready"
    assert made.container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert made.container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert "--openai" in made.command
    assert "--grpc-port" not in made.command
    assert [each["name"] for each in made.service["spec"]["ports"]] == ["http"]
    assert "protocolVersions" not in made.runtime["spec"]
    assert "'kpt-serve[serve,openai]>=" in made.containerfile
    assert "limits" not in made.container["resources"]


def test_an_unsigned_package_is_told_so(write):
    made = write()
    assert "--unsigned" in made.command
    assert "--key" not in made.command
    assert [each["name"] for each in made.pod["volumes"]] == ["tmp"]
    for file in ("Containerfile", "deployment.yaml"):
        assert "not signed" in (made.folder / file).read_text()


@pytest.mark.parametrize("openai", [False, True])
def test_a_signed_package_needs_the_key(openai, write):
    made = write({"openai": openai}, signed=True, kind="transformers" if openai else "program")
    assert made.command[made.command.index("--key") + 1] == "/keys/key.pub.pem"
    assert "--unsigned" not in made.command
    for container, volumes in (
        (made.container, made.pod["volumes"]),
        (made.kserve, made.runtime["spec"]["volumes"]),
    ):
        assert {"name": "key", "mountPath": "/keys", "readOnly": True} in container["volumeMounts"]
        assert {"name": "key", "configMap": {"name": "toy-key"}} in volumes
    assert f"'kpt-serve[serve,{'openai,' * openai}sign]>=" in made.containerfile


@pytest.mark.parametrize(
    ("weights", "request_", "seconds"), [(0, 512, 300), (100 << 20, 632, 310), (30 * GIB, 36864 + 512, 600)]
)
def test_memory_and_time_to_load_follow_the_weights(weights, request_, seconds, write):
    made = write(weights=weights)  # the golden results, of 1 GiB, are not counted
    assert made.container["resources"]["requests"]["memory"] == f"{request_}Mi"
    assert made.container["resources"]["limits"] == {"memory": f"{2 * request_}Mi"}
    assert (
        made.container["startupProbe"]["failureThreshold"] * made.container["startupProbe"]["periodSeconds"] == seconds
    )


def test_a_gpu_is_asked_for_where_the_package_may_use_one(write):
    made = write(device_types=("cpu", "cuda"))
    assert made.container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert made.kserve["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert made.command[made.command.index("--device-type") + 1] == "cuda"
    assert made.scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == "kpt_requests_waiting"
    assert "'kpt-backend-nvidia>=" in made.containerfile
    assert "whl/cpu" not in made.containerfile
    assert " gcc " in made.containerfile


def test_rocm_is_cuda_for_torch_and_another_resource(write):
    made = write({"device_type": "rocm", "base": "rocm/pytorch:rocm7.1"}, device_types=("cuda",))
    assert made.container["resources"]["limits"] == {"amd.com/gpu": 1}
    assert made.command[made.command.index("--device-type") + 1] == "cuda"
    assert "\nFROM rocm/pytorch:rocm7.1\n" in made.containerfile
    assert "'kpt-backend-amd>=" in made.containerfile


def test_pip_installs_what_the_package_needs_each_name_once(write):
    made = write(needs=(Distribution("kpt_MoE", "<0.2, >=0.1"), Distribution("transformers", ">=5.20")))
    found = re.findall(r"^    '(.*)'(?: \\)?$", made.containerfile, re.M)
    assert found == [
        *("kpt-backend-cpu>=0.1,<0.2", "kpt-cli>=0.1,<0.2", "kpt-core>=0.1,<0.2", "kpt-moe>=0.1,<0.2"),
        *("kpt-serve[serve]>=0.1,<0.2", "torch==2.13.*", "transformers>=5.20"),
    ]
    assert "\nFROM python:3.11-slim\n" in made.containerfile


@pytest.mark.parametrize(
    ("name", "label"), [("Qwen3-30B_A3B", "qwen3-30b-a3b"), ("toy v1.5", "toy-v1-5"), ("no", "no"), ("true", "true")]
)
def test_a_packages_name_becomes_a_label(name, label, write):
    made = write(name=name)
    for each in (made.deployment, made.service, made.budget, made.scaler, made.runtime, made.inference):
        assert each["metadata"]["name"] == label  # a text, where YAML would read a truth


@pytest.mark.parametrize(
    ("kwargs", "options", "told"),
    [
        ({"name": "7b"}, {}, "'7b' is no name for Kubernetes"),
        ({"name": "a" * 41}, {}, "is no name for Kubernetes"),
        ({}, {"name": "Toy"}, "'Toy' is no name for Kubernetes"),
        ({}, {"name": "toy\nkind: Secret"}, "is no name for Kubernetes"),
        ({}, {"image": "registry/Toy:1"}, "--image is 'registry/Toy:1'; expected an image's name"),
        ({}, {"image": 'toy:1"\nrun: x'}, "expected an image's name"),
        ({}, {"image": "toy:1\n"}, "expected an image's name"),
        ({}, {"image": "registry:5000/toy"}, "expected a tag, as registry:5000/toy:1"),
        ({}, {"image": "toy:latest"}, "expected a tag, as toy:1"),
        ({}, {"base": "python:3.11 AS x"}, "--base is 'python:3.11 AS x'; expected"),
        ({"needs": (Distribution("x", "===$HOME"),)}, {}, "expected a name and a range"),
        ({"needs": (Distribution("x", "===1'id'"),)}, {}, "expected a name and a range"),
        ({}, {"openai": True}, "is a program, not a language model"),
        ({}, {"device_type": "cuda"}, "toy runs on cpu, and manifests are for cuda, rocm, cpu; got cuda"),
        ({"device_types": ("tpu",)}, {}, "toy runs on tpu"),
        ({"device_types": ("cuda",)}, {"device_type": "rocm"}, "torch for ROCm is not on PyPI"),
    ],
)
def test_what_can_t_be_is_a_sentence_and_leaves_nothing(kwargs, options, told, write, tmp_path):
    with pytest.raises(PackageError) as raised:
        write(options, **kwargs)
    assert told in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


@pytest.mark.parametrize(
    "image", ["toy:1", "REGISTRY/toy:1", "registry.example:5000/a/b_c/d-e:v1.2", f"ghcr.io/a/toy@sha256:{'0' * 64}"]
)
def test_an_images_name_is_taken_as_it_is(image, write):
    assert write({"image": image}).container["image"] == image


def test_a_folder_that_is_taken_stays(write, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("1")
    with pytest.raises(PackageError, match="exists already"):
        write()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_all_is_written_or_nothing(write, tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        if self.name == "kserve.yaml":  # the last
            raise OSError(28, "No space left on device")
        return plain(self, *args, **kwargs)

    plain = Path.write_text
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PackageError, match="No space left on device"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_the_committed_example_is_what_is_written_now(tmp_path):
    if not EXAMPLE.parents[2].joinpath("packages").is_dir():
        pytest.skip("there is no repository around these tests")
    package = make_package(tmp_path / "package", weights=1579488)
    write_manifests(package, tmp_path / "out", image="registry.example/toy:1")
    for file in FILES:
        assert (EXAMPLE / file).read_text() == (tmp_path / "out" / file).read_text(), f"write {EXAMPLE / file} again"


def test_kserve_knows_every_field(written):
    schemas = json.loads((HERE / "kserve.schema.json").read_text())
    for document in (written.runtime, written.inference):
        jsonschema.validate(document, schemas[document["kind"]])


def test_a_field_that_kserve_does_not_know_is_found(write):
    schema = json.loads((HERE / "kserve.schema.json").read_text())["InferenceService"]
    inference = write().inference
    model = inference["spec"]["predictor"]["model"]
    model["storageUrl"] = model.pop("storageUri")
    with pytest.raises(jsonschema.ValidationError, match="'storageUrl' was unexpected"):
        jsonschema.validate(inference, schema)


def _tool(variable, name):
    """Return a tool's path: what the environment says, or what is on the path."""
    found = os.environ.get(variable) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; install it, or set {variable} to its path")
    return found


def test_kubernetes_knows_every_field(written):
    tool = _tool("KPT_KUBERNETES_VALIDATE", "kubernetes-validate")
    files = [str(written.folder / name) for name in KUBERNETES]
    done = subprocess.run([tool, "--strict", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    deployment = written.folder / "deployment.yaml"
    deployment.write_text(deployment.read_text().replace("readOnlyRootFilesystem", "readOnlyRootFileSystem"))
    assert subprocess.run([tool, "--strict", str(deployment)], capture_output=True, check=False).returncode != 0


def test_hadolint_is_silent(written):
    tool = _tool("KPT_HADOLINT", "hadolint")
    done = subprocess.run([tool, "Containerfile"], cwd=written.folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
