"""`kpt validate check` and `compare`: a tiny genuine report, and every way in which it was forged."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from kpt_cli.bench.contest import OpLine, results_of
from kpt_cli.validate import reading
from kpt_cli.validate.checking import faults
from kpt_cli.validate.comparing import compare_reports, median_interval
from kpt_cli.validate.running import Run, Step
from kpt_optimize.measure import gain_of, noise_share

OURS, THEIRS = [1.0, 1.2, 1.1, 1.3, 1.15, 1.05, 1.12, 1.18], [2.0, 2.5, 2.2, 2.4, 2.3, 2.1, 2.2, 2.3]
DOCTOR = {
    "devices": [{"device": "cpu", "name": "Fake CPU", "memory_bytes": 1, "features": ["avx2"]}],
    "backends": [{"name": "torch", "unavailable": None, "capabilities": {"cpu": []}}],
    "versions": {"torch": "2.13.0", "python at": "/somewhere"},
    "third_parties": {"jax": None},
    "packages": [{"name": "kpt-core", "version": "0.1.0"}],
    "environment": {},
}
JUNIT = (
    '<testsuites><testsuite hostname="vm"><testcase classname="c" name="a" time="1.5"><properties><property name="p"/>'
    '</properties></testcase><testcase name="b"><skipped type="t" message="no GPU">/here.py: no GPU</skipped>'
    "</testcase></testsuite></testsuites>"
)


def bench(ours=OURS, theirs=THEIRS) -> dict:
    line = OpLine("4 x 4", "float32", tuple(results_of(("kpt", "linear"), (ours, theirs))))
    return {"benchmark": "fp8", "machine": {"commit": "abc"}, "lines": [line.as_dict()]}


def says(name: str, text: str, file: str, code: int = 0) -> Step:
    """Return a step that writes a text to a file and ends."""
    program = f"import sys; open({file!r}, 'w').write({text!r}); print('done', file=sys.stderr); sys.exit({code})"
    return Step(name, (sys.executable, "-c", program), 60, files=(file,))


def make(folder: Path, figures: dict) -> Path:
    run = Run(folder, None, lambda line: None, suite="quick", only=[])
    run.run([says("doctor", json.dumps(DOCTOR), reading.DOCTOR)])
    run.read_machine()
    suite = says("suite-torch", JUNIT, "junit-torch.xml")
    run.run([suite, says("bench-fp8", json.dumps(figures, indent=1), "bench-fp8.json")])
    assert run.seal()
    return folder


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> dict[str, str]:
    """The files of a genuine report, which steps of some milliseconds made."""
    folder = make(tmp_path_factory.mktemp("report") / "r", bench())
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def report(tmp_path, genuine) -> Path:
    for name, text in genuine.items():
        file = tmp_path / "report" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "report"


def seal(folder: Path) -> None:
    """Derive summary and manifest again, as a forger would who knows them."""
    (folder / reading.SUMMARY).write_text(reading.summary(folder))
    (folder / reading.MANIFEST).write_text(reading.manifest(folder))


def test_a_genuine_report_has_no_fault_and_keeps_no_paths(kpt, report) -> None:
    result = kpt("validate", "check", report)
    assert result.exit_code == 0, result.output
    assert "| torch | 1 | 1 | 0 |" in (report / reading.SUMMARY).read_text()
    junit, hardware = ((report / name).read_text() for name in ("junit-torch.xml", reading.HARDWARE))
    assert not any(text in junit for text in ("propert", "/here.py", "vm", "classname", "time", "type"))
    assert "/somewhere" not in hardware


def replaced(file: str, old: str, new: str):
    def forge(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return forge


def edited(change, file: str = reading.STEPS):
    """Return a forger who changes a JSON file and seals the folder again."""

    def forge(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        change(document)
        (folder / file).write_text(json.dumps(document))
        seal(folder)

    return forge


def resealed(forge):
    def both(folder: Path) -> None:
        forge(folder)
        seal(folder)

    return both


def of_step(number: int, **entries):
    return edited(lambda document: document["steps"][number].update(entries))


def of_result(number: int, **entries):
    return edited(lambda document: document["lines"][0]["results"][number].update(entries), "bench-fp8.json")


def fewer_rounds(document: dict) -> None:
    for result in document["lines"][0]["results"]:
        result["times"] = result["times"][:4]


FORGED = {
    "digit of the summary": (replaced("SUMMARY.md", "1135 ms", "1035 ms"), "SUMMARY.md: is not what the files say"),
    "sealed digit of it": (
        lambda folder: [
            replaced("SUMMARY.md", "1135 ms", "1035 ms")(folder),
            (folder / reading.MANIFEST).write_text(reading.manifest(folder)),
        ],
        "SUMMARY.md: is not what the files say: line 31 is ",
    ),
    "digit of a time": (replaced("bench-fp8.json", "1.18", "1.17"), "bench-fp8.json: was changed"),
    "missing file": (lambda folder: (folder / "junit-torch.xml").unlink(), "junit-torch.xml: is missing"),
    "added file": (lambda folder: (folder / "notes.txt").write_text("ok"), "notes.txt: was added"),
    "missing and sealed": (
        resealed(lambda folder: (folder / "logs" / "doctor.txt").unlink()),
        "logs/doctor.txt: is missing: it is the log of doctor",
    ),
    "failed step": (of_step(2, exit_code=3), "steps.json: bench-fp8 failed with exit code 3"),
    "limit": (of_step(2, ended="limit", exit_code=None), "steps.json: bench-fp8 was stopped at its limit of 60 s"),
    "nothing ran": (of_step(1, exit_code=5), "steps.json: suite-torch ran nothing: pytest's exit code is 5"),
    "all skipped": (
        resealed(replaced("junit-torch.xml", '<testcase name="a" />', "")),
        "junit-torch.xml: no test ran: 1 were skipped",
    ),
    "failed test": (
        resealed(replaced("junit-torch.xml", '<testcase name="a" />', '<testcase name="a"><failure/></testcase>')),
        "junit-torch.xml: a failed",
    ),
    "no reason": (
        resealed(replaced("junit-torch.xml", 'message="no GPU"', 'message=" "')),
        "junit-torch.xml: b was skipped without a reason",
    ),
    "few rounds": (edited(fewer_rounds, "bench-fp8.json"), "4 x 4, float32, kpt: 4 rounds; a figure needs at least 5"),
    "median": (of_result(0, seconds=1.034), "4 x 4, float32, kpt: is 1.034, the median of its 8 times is 1.135"),
    "gain": (of_result(1, gain=3.0), "4 x 4, float32, over linear: is 3, the median of its 8 times is 2"),
    "peer's seconds": (of_result(1, seconds=9.0), "4 x 4, float32, linear: its seconds are 9.0, "),
    "noise": (of_result(0, noise=0.001), "4 x 4, float32, kpt: its noise is 0.001, that of its 8 times is "),
    "hidden figure": (
        of_result(1, gain=None, seconds=None),
        "over linear: is given as too noisy, and its 8 times give",
    ),
    "no times": (
        lambda folder: replaced("bench-fp8.json", '"times"', '"tims"')(folder),
        "bench-fp8.json: is damaged: KeyError: 'times'",
    ),
    "log without its end": (
        resealed(lambda folder: (folder / "logs" / "bench-fp8.txt").write_text("$ kpt bench\n")),
        "logs/bench-fp8.txt: ends with '$ kpt bench', expected 'exit code 0 after ",
    ),
    "no manifest": (
        lambda folder: (folder / reading.MANIFEST).unlink(),
        "MANIFEST.sha256: is missing: the report is un",
    ),
    "left out": (
        edited(lambda steps: steps.update(only=["suite-tpu"], left_out={"suite-tpu": "no torch_xla"})),
        "steps.json: suite-tpu was asked for and left out: no torch_xla",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_each_forgery_is_told_with_its_file(report, name) -> None:
    forge, told = FORGED[name]
    forge(report)
    found = faults(report)
    assert any(told in fault for fault in found), found


def test_faults_end_with_1_and_what_is_no_report_with_2(kpt, report, tmp_path) -> None:
    (report / "added").touch()
    found = kpt("validate", "check", report, "--json")
    assert (found.exit_code, json.loads(found.stdout)["ok"]) == (1, False)
    for text in (None, "[", "[]", '{"format": "kpt-platform-9", "steps": []}'):
        if text is not None:
            (tmp_path / reading.STEPS).write_text(text)
        for command in (("check",), ("compare", report)):
            assert kpt("validate", *command, tmp_path).exit_code == 2
    assert kpt("validate", "check", tmp_path / "none").exit_code == 2


def test_the_noise_of_a_figure_is_that_of_the_benchmarks() -> None:
    ratios = [a / b for a, b in zip(THEIRS, OURS, strict=True)]
    gain, error = gain_of(THEIRS, OURS)
    assert reading.median_of(ratios) == (gain, pytest.approx(noise_share(gain, error)))


def test_check_and_compare_need_no_torch() -> None:
    program = "import sys, kpt_cli.validate.checking, kpt_cli.validate.comparing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        (range(1, 6), (0.0, float("inf"))),  # 5 tosses are all alike in 2 of 32: too often
        (range(1, 9), (1, 8)),  # in 2 of 256, and seven are in 18 of 256
        (range(1, 101), (39, 62)),  # more than 61 heads in 100 tosses, or fewer than 39: 2.1%
    ],
)
def test_intervals_are_those_of_the_binomial_distribution(values, interval) -> None:
    assert median_interval(values) == interval


def test_ratios_have_intervals_and_say_where_1_is_inside(kpt, tmp_path) -> None:
    twice = [each / 2 for each in OURS]
    a, b = make(tmp_path / "a", bench()), make(tmp_path / "b", bench(twice, THEIRS))
    ours, over = compare_reports(a, b).ratios
    assert ours.ratio == pytest.approx(statistics.median(OURS) / statistics.median(twice)) == 2
    assert (ours.low, ours.high) == (pytest.approx(1.0 / 0.65), pytest.approx(1.3 / 0.5))
    assert over.ratio == pytest.approx(2)
    assert over.low > 1
    shown = kpt("validate", "compare", a, b)
    assert shown.exit_code == 0, shown.output
    assert "A: cpu: Fake CPU" in shown.stdout
    assert "2.00x [1.54 to 2.60]" in shown.stdout
    assert "~ 1.00x [" in kpt("validate", "compare", a, a).stdout


def test_a_figure_that_was_too_noisy_is_not_shown_again(kpt, tmp_path) -> None:
    noisy = [1.0, 480.0, 3.0, 900.0, 2.0, 5.0, 70.0, 8.0]
    a, b = make(tmp_path / "a", bench(noisy, noisy)), make(tmp_path / "b", bench())
    ours = compare_reports(a, b).ratios[0]
    assert (ours.a, ours.b, ours.told) == (None, statistics.median(OURS), False)
    assert "too noisy   1135 ms" in kpt("validate", "compare", a, b).stdout


def test_figures_of_one_report_alone_are_listed(kpt, tmp_path) -> None:
    figures = bench()
    figures["lines"][0]["title"] = "8 x 8"
    document = json.loads(
        kpt("validate", "compare", make(tmp_path / "a", bench()), make(tmp_path / "b", figures), "--json").stdout
    )
    assert document["ratios"] == []
    assert document["only_a"] == ["bench-fp8.json: 4 x 4, float32, kpt", "bench-fp8.json: 4 x 4, float32, over linear"]
