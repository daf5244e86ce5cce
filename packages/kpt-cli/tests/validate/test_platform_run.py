"""`kpt validate platform`: steps are replaced by tiny commands."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from kpt_cli.validate import platform as command
from kpt_cli.validate import reading
from kpt_cli.validate.checking import faults
from kpt_cli.validate.running import Run, Step, steps_for

DOCTOR = {
    "devices": [{"device": "cpu", "name": "Fake CPU", "memory_bytes": 1, "features": []}],
    "backends": [
        {"name": "cpu", "device_types": ["cpu"], "unavailable": None, "capabilities": {"cpu": []}, "broken": []},
        {"name": "tpu", "device_types": ["xla"], "unavailable": "no torch_xla", "capabilities": {}, "broken": []},
        {"name": "xpu", "device_types": ["xpu"], "unavailable": None, "capabilities": {}, "broken": []},
        {"name": "bad", "device_types": ["cpu"], "unavailable": None, "capabilities": {}, "broken": ["ValueError: x"]},
    ],
    "versions": {},
    "third_parties": {},
    "packages": [],
    "environment": {},
}


def python(name: str, program: str, limit: float = 60, stdout: str | None = None) -> Step:
    return Step(name, (sys.executable, "-c", program), limit, stdout=stdout)


def started(folder) -> Run:
    return Run(folder, None, lambda line: None, suite="quick", only=[])


def test_steps_are_those_that_the_machine_can_run() -> None:
    steps, left_out = steps_for(DOCTOR, "quick", [])
    assert [step.name for step in steps] == ["suite-cpu", "bench-moe", "bench-attention", "bench-fp8", "demo"]
    assert left_out == {
        "suite-tpu": "no torch_xla",
        "suite-xpu": "no device for it is here: xpu",
        "suite-bad": "ValueError: x",
    }
    suite = steps[0].command
    assert {"--kpt-backend=cpu", "--kpt-quick", "--kpt-report=report-cpu.json", "--junitxml=junit-cpu.xml"} <= {*suite}
    assert not any("quick" in word for step in steps_for(DOCTOR, "full", [])[0][:-1] for word in step.command)
    wanted, left_out = steps_for(DOCTOR, "quick", ["demo", "suite-tpu"])
    assert ([step.name for step in wanted], list(left_out)) == (["demo"], ["suite-tpu"])


def test_a_step_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path) -> None:
    run = started(tmp_path / "report")
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    run.run(
        [
            python("fails", "import sys; print('why', end=''); sys.exit(3)"),
            python("hangs", child + "time.sleep(60)", limit=0.2),
            python("says", "print('{}')", stdout="said.json"),
        ]
    )
    document = json.loads((run.folder / reading.STEPS).read_text())
    fails, hangs, says = document["steps"]
    assert (fails["ended"], fails["exit_code"]) == ("exited", 3)
    assert (hangs["ended"], hangs["exit_code"]) == ("limit", None)
    assert hangs["seconds"] < 10
    assert (says["exit_code"], (run.folder / "said.json").read_text()) == (0, "{}\n")
    logs = [(run.folder / "logs" / f"{name}.txt").read_text().splitlines() for name in ("fails", "hangs", "says")]
    assert logs[0][1:] == ["why", f"exit code 3 after {fails['seconds']} s"]
    assert [log[-1] for log in logs[1:]] == ["stopped at its limit of 0.2 s", f"exit code 0 after {says['seconds']} s"]
    assert all(log[0].startswith("$ ") for log in logs)


def test_a_report_names_no_folder_of_the_user(tmp_path, monkeypatch) -> None:
    home, source = tmp_path / "ann", tmp_path / "code" / "src"
    for folder in (home / "here", source, tmp_path / "env"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "here")
    (tmp_path / "env" / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(source), str(tmp_path / "env" / "site"), *sys.path])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    paths = [str(path) for path in (home / "a.py", home / "here" / "b", source / "c", tmp_path / "env" / "site" / "d")]
    kept = [f"{home}ette/e", f"/mnt{home}"]
    program = (
        f"import os, sys; paths = {paths + kept!r} + [os.getcwd()]; print(paths);"
        "open('said.json', 'w').write(os.linesep.join(paths)); print(*paths, file=sys.stderr)"
    )
    run = started(tmp_path / "report")
    run.run([Step("doctor", (sys.executable, "-c", program), 60, files=("said.json",), stdout="doctor.json")])
    expected = ["~/a.py", "{here}/b", "{source}/c", "{environment}/site/d", *kept, "{work}/doctor"]
    assert (run.folder / "said.json").read_text().split() == expected
    assert (run.folder / "doctor.json").read_text() == f"{expected}\n"
    assert (run.folder / "logs" / "doctor.txt").read_text().splitlines()[1:-1] == [" ".join(expected)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_step_and_leaves_an_unfinished_report(tmp_path, number) -> None:
    run = started(tmp_path / "report")
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run.run([python("sleeps", program), python("never", "")])
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    found = faults(run.folder)
    assert "MANIFEST.sha256: is missing: the report is unfinished" in found[0]
    assert "steps.json: sleeps did not end: the report is unfinished" in found
    assert "steps.json: never did not end: the report is unfinished" in found


@pytest.fixture
def tiny(monkeypatch):
    """Have doctor and the other steps be tiny commands."""
    monkeypatch.setattr(
        command, "doctor_step", lambda: python("doctor", f"print({json.dumps(DOCTOR)!r})", stdout=reading.DOCTOR)
    )
    steps: list[Step] = []
    monkeypatch.setattr(command, "steps_for", lambda doctor, suite, only: (steps, {"suite-tpu": "no torch_xla"}))
    return steps


def test_the_command_seals_a_report_that_check_accepts(kpt, tmp_path, tiny) -> None:
    tiny.append(python("demo", "print('{}')", stdout="demo.json"))
    result = kpt("validate", "platform", "-o", tmp_path / "r", "--limit", 30)
    assert result.exit_code == 0, result.output
    assert faults(tmp_path / "r") == []
    assert "| suite-tpu |  | left out: no torch_xla |" in (tmp_path / "r" / reading.SUMMARY).read_text()
    assert {step["limit"] for step in json.loads((tmp_path / "r" / reading.STEPS).read_text())["steps"]} == {30}


def test_a_failed_step_is_exit_code_1_and_a_whole_report(kpt, tmp_path, tiny) -> None:
    tiny.append(python("demo", "raise SystemExit(4)", stdout="demo.json"))
    assert kpt("validate", "platform", "-o", tmp_path / "r").exit_code == 1
    assert faults(tmp_path / "r") == ["steps.json: demo failed with exit code 4; logs/demo.txt says why"]


def test_what_can_not_be_run_is_refused_before_anything_runs(kpt, tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    taken = kpt("validate", "platform", "-o", tmp_path / "full")
    assert (taken.exit_code, "is not empty; choose a new folder" in taken.stderr) == (2, True)
    unknown = kpt("validate", "platform", "-o", tmp_path / "r", "--only", "bench-mo")
    assert (unknown.exit_code, "did you mean bench-moe" in unknown.stderr) == (2, True)
    assert not (tmp_path / "r").exists()
