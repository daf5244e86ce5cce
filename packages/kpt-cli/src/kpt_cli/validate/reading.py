"""A platform report: what its files say, and the summary and the seal that follow from them alone, without torch."""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kpt_cli.errors import CliError

FORMAT = "kpt-platform-1"
HARDWARE, STEPS, SUMMARY, MANIFEST = "hardware.json", "steps.json", "SUMMARY.md", "MANIFEST.sha256"
DOCTOR = "doctor.json"
LEAST_ROUNDS = 5  #: of a figure
UNSTEADY = 0.2  #: noise past which `kpt bench` gives no figure: that of `kpt_optimize.measure`
OURS = "kpt"
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, ElementTree.ParseError)

Document = Mapping[str, Any]  #: a JSON file, or a part of it


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a benchmark: KPT's time, or how many times faster it is than a peer."""

    file: str
    case: str  # sizes and dtype
    name: str  # `kpt`, or `over PEER`
    value: float | None  # seconds, or the ratio; None where it was too noisy to be given
    noise: float  # twice the standard error, as a share of the value
    values: tuple[float, ...]  # seconds, or ratios, of the rounds

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what the same figure of another report has too."""
        return self.file, self.case, self.name

    def __str__(self) -> str:
        return f"{self.file}: {self.case}, {self.name}"


@dataclass(frozen=True, slots=True)
class Suite:
    """What pytest's XML file says of a run of the suite."""

    file: str
    backend: str
    passed: int
    failed: tuple[str, ...]  # names of tests
    skipped: Counter[str]  # by reason
    unexplained: tuple[str, ...]  # names of tests that were skipped without a reason


def read_steps(folder: Path) -> Document:
    """Return `steps.json`; `CliError` if the folder is no report of a platform, or of another format."""
    file = folder / STEPS
    if not file.is_file():
        what = "is no folder" if not folder.is_dir() else f"holds no {STEPS}"
        raise CliError(f"{folder} {what}; expected what `kpt validate platform -o FOLDER` wrote")
    try:
        document: Document = json.loads(file.read_text(encoding="utf-8"))
        found = document.get("format")
        _ = [step["name"] for step in document["steps"]]
    except DAMAGED as error:
        raise CliError(f"{file} can't be read ({type(error).__name__}: {error}): the folder is no report") from None
    if found != FORMAT:
        raise CliError(f"{file} is of format {found!r}; this kpt reads {FORMAT!r}: use the kpt that wrote it")
    return document


def read_hardware(folder: Path) -> Document:
    """Return `hardware.json`."""
    document: Document = json.loads((folder / HARDWARE).read_text(encoding="utf-8"))
    return document


def hardware_of(doctor: Document, processors: int) -> dict[str, Any]:
    """Return what a report says of its machine, out of what `kpt doctor --json` found."""
    here = ("python at",)  # where files lie tells nothing of the machine
    return {
        "processors": processors,
        "devices": doctor["devices"],
        "backends": [
            {key: each[key] for key in ("name", "unavailable", "capabilities")} for each in doctor["backends"]
        ],
        "versions": {name: found for name, found in doctor["versions"].items() if name not in here},
        "third_parties": {name: found for name, found in doctor["third_parties"].items() if found is not None},
        "packages": {each["name"]: each["version"] for each in doctor["packages"]},
        "environment": doctor["environment"],
    }


def machine_name(hardware: Document) -> str:
    """Return a machine in a line: its devices, processors and variables."""
    devices = [f"{each['device']}: {each['name']}" for each in hardware["devices"]]
    variables = [f"{name}={value}" for name, value in hardware["environment"].items()]
    return "; ".join([*devices, f"{hardware['processors']} processors", *variables])


def files_of(steps: Document, beginning: str) -> list[str]:
    """Return the files of the steps that ended, whose names begin so."""
    ended = [step for step in steps["steps"] if step["ended"] is not None]
    return [file for step in ended for file in step["files"] if file.startswith(beginning)]


def read_figures(folder: Path, file: str) -> list[Figure]:
    """Return the figures of a benchmark's file."""
    document = json.loads((folder / file).read_text(encoding="utf-8"))
    return [figure for line in document["lines"] if "results" in line for figure in _figures(file, line)]


def _figures(file: str, line: Document) -> Iterator[Figure]:
    own = tuple(line["results"][0]["times"])
    for result in line["results"]:
        times = tuple(result["times"])
        ours = result["implementation"] == OURS
        name = OURS if ours else f"over {result['implementation']}"
        # Rounds are paired: what slowed the machine down met both.
        values = times if ours else tuple(theirs / mine for theirs, mine in zip(times, own, strict=True))
        value = result["seconds"] if ours else result["gain"]
        yield Figure(file, case_of(line), name, value, result["noise"], values)


def case_of(line: Document) -> str:
    """Return what a line of a benchmark measured: its sizes and dtype."""
    if "title" in line:
        return f"{line['title']}, {line['dtype']}"
    shape = line["shape"]
    kind = "SwiGLU" if shape["gated"] else "GELU"
    sizes = f"{shape['hidden_size']} x {shape['intermediate_size']}"
    experts = f"{shape['top_k']} of {shape['num_experts']} experts"
    return f"{shape['name']}, {experts}, {sizes}, {kind}, {line['dtype']}"


def median_of(values: Sequence[float]) -> tuple[float, float]:
    """Return a median and the noise that `kpt bench` gives with it, as `kpt_optimize.measure` computes them."""
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    return median, 2 * (1.86 * spread / len(values) ** 0.5) / median if median else math.inf


def read_suite(folder: Path, file: str) -> Suite:
    """Return what pytest's XML file says."""
    passed, failed, unexplained, skipped = 0, [], [], Counter[str]()
    for case in ElementTree.parse(folder / file).iter("testcase"):
        name, skip = case.get("name", ""), case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif skip is None:
            passed += 1
        else:
            reason = (skip.get("message") or "").strip()
            skipped[reason] += 1
            unexplained += [] if reason else [name]
    backend = file.removeprefix("junit-").removesuffix(".xml")
    return Suite(file, backend, passed, tuple(failed), skipped, tuple(unexplained))


def ending(step: Document) -> str:
    """Return how a step ended: the last line of its log."""
    if step["ended"] == "limit":
        return f"stopped at its limit of {step['limit']:g} s"
    return f"exit code {step['exit_code']} after {step['seconds']:.1f} s"


def summary(folder: Path) -> str:
    """Return `SUMMARY.md`, from the folder's other files and nothing else."""
    steps, hardware = read_steps(folder), read_hardware(folder)
    lines = ["# What `kpt validate platform` found", "", f"- machine: {machine_name(hardware)}"]
    lines += [
        f"- features: {device['device']}: {', '.join(device['features']) or 'none'}" for device in hardware["devices"]
    ]
    lines += [f"- versions: {', '.join(f'{name} {found}' for name, found in hardware['versions'].items() if found)}"]
    lines += [f"- commit: {', '.join(_commits(folder, steps)) or 'unknown'}", f"- begun: {steps['start']}"]
    lines += ["", "| step | command | ending |", "|---|---|---|"]
    lines += [_row(step["name"], f"`{step['command']}`", ending(step)) for step in steps["steps"]]
    lines += [_row(name, "", f"left out: {why}") for name, why in steps["left_out"].items()]
    lines += [*_suites(folder, steps), *_benchmarks(folder, steps)]
    if any(device["device"].partition(":")[0] in ("cuda", "xpu") for device in hardware["devices"]):
        lines += [
            "",
            "These figures are of the processor. In a checkout `python tools/gpu prove --source` measures the GPU.",
        ]
    return "\n".join(lines) + "\n"


def _commits(folder: Path, steps: Document) -> list[str]:
    machines = (
        json.loads((folder / file).read_text(encoding="utf-8"))["machine"] for file in files_of(steps, "bench-")
    )
    reports = (json.loads((folder / file).read_text(encoding="utf-8")) for file in files_of(steps, "report-"))
    return [*dict.fromkeys(str(each["commit"]) for each in (*reports, *machines) if each["commit"])]


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _suites(folder: Path, steps: Document) -> Iterator[str]:
    suites = [read_suite(folder, file) for file in files_of(steps, "junit-")]
    if not suites:
        return
    yield from ("", f"## The conformance suite, {steps['suite']}", "", "| backend | passed | skipped | failed |")
    yield "|---|---|---|---|"
    for suite in suites:
        yield _row(suite.backend, suite.passed, suite.skipped.total(), len(suite.failed))
    reasons = sum((suite.skipped for suite in suites), Counter[str]())
    yield from ("", "| skipped | reason |", "|---|---|")
    yield from (_row(count, reason) for reason, count in sorted(reasons.items(), key=lambda each: (-each[1], each[0])))
    if failed := [name for suite in suites for name in suite.failed]:
        yield from ("", "Failed:", "", *(f"- `{name}`" for name in failed))


def _benchmarks(folder: Path, steps: Document) -> Iterator[str]:
    for file in files_of(steps, "bench-"):
        yield from ("", f"## {file.removeprefix('bench-').removesuffix('.json')}", "")
        yield "KPT's median time, and how many times faster it is than each peer; ± is twice the standard error."
        yield from ("", "| case | figure | value | rounds |", "|---|---|---|---|")
        for figure in read_figures(folder, file):
            yield _row(figure.case, figure.name, written(figure), len(figure.values))


def written(figure: Figure) -> str:
    """Return a figure as the summary has it."""
    if figure.value is None:
        return f"too noisy (±{figure.noise:.0%})"
    value = f"{figure.value * 1e3:.4g} ms" if figure.name == OURS else f"{figure.value:.3g}x"
    return f"{value} ± {figure.noise:.1%}"


def manifest(folder: Path) -> str:
    """Return `MANIFEST.sha256`, as sha256sum writes and checks it."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in contents(folder)}
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def contents(folder: Path) -> list[str]:
    """Return the names of all files but the manifest, sorted."""
    files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_symlink() or file.is_file())
    return sorted(name for name in files if name != MANIFEST)
