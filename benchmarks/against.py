"""Compare this tree with another revision, both on this machine, in turn: what became slower, beyond noise, fails.

    nox -s bench -- --against main~3
    nox -s bench -- --against main~3 -k moe.experts -k bfloat16 --json ratios.json

The other revision is built into an environment of its own (`.nox/against-REV`, kept) under this tree's constraints. A
process of each answers in turn, so a change of the machine's load meets both. What is measured are the ops on their
cases of real models and on the first of the others. An op or case that one of them lacks, or whose input is another
one there, is left out and told.

A ratio is this tree's seconds over the other's in the same round; the interval is the median's, without any assumption
about the noise. Slower means that all of the interval lies beyond the tolerance, in two measurements.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from timing import CONFIDENCE, interleaved, ratio_of

ROOT = Path(__file__).parents[1]
ANSWERING = Path(__file__).with_name("answering.py")
PINS = ROOT / "constraints" / "cpu.txt"
#: Neither is measured; both bring much that is not needed.
LEFT_OUT = ("kpt-cli", "kpt-conformance")
#: Seconds of a timing, so that the clock and a hiccup don't matter.
LEAST = 0.02


class Revision:
    """A process with the packages of a revision, which answers questions."""

    def __init__(self, python: Path) -> None:
        env = os.environ | {"KPT_TUNING": "0", "OMP_WAIT_POLICY": "passive"}  # who waits leaves the cores to the other
        self.python = python
        self.process = subprocess.Popen(
            [python, "-P", ANSWERING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=python.parent,
        )

    def ask(self, **question: object) -> dict[str, Any]:
        """Return what it answers; the first word of trouble is under `error`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.python} ended with {self.process.wait()} when it was asked {question}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Ratio:
    """This tree's time over the other's.

    Attributes:
        op, case, dtype, direction: what was measured.
        kernel: of this tree.
        seconds: of this tree, the median.
        ratio: the rounds' median; above 1 this tree is slower.
        low, high: the median's interval.
    """

    op: str
    case: str
    dtype: str
    direction: str
    kernel: str
    seconds: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        what = f"{self.op:24} {self.case[:28]:28} {self.dtype:9} {self.direction:17}"
        return f"{what} {self.seconds * 1e3:10.3f} ms  {self.ratio:6.3f} ({self.low:.3f} to {self.high:.3f})"


def compare(ours: Revision, theirs: Revision, entry: list[str], training: bool, rounds: int) -> Ratio | str:
    """Return the ratio for an op on a case, or why there is none."""
    op, case, dtype = entry
    question = {"do": "prepare", "op": op, "case": case, "dtype": dtype, "training": training}
    here, there = ours.ask(**question), theirs.ask(**question)
    for whose, facts in (("this tree", here), ("the other revision", there)):
        if "error" in facts:
            return f"{whose}: {facts['error'].splitlines()[0]}"
    if here["input"] != there["input"]:
        return "the case has other input there"
    if not math.isclose(here["size"], there["size"], rel_tol=0.02, abs_tol=1e-6):
        return f"the results differ: of mean size {here['size']:.4g} here and {there['size']:.4g} there"
    try:
        here_times, there_times = interleaved([partial(_seconds, each) for each in (ours, theirs)], rounds=rounds)
    except RuntimeError as error:
        return str(error)
    found = ratio_of(here_times, there_times)
    direction = "forward+backward" if training else "forward"
    taken = statistics.median(here_times)
    return Ratio(op, case, dtype, direction, here["kernel"], taken, found.value, found.low, found.high)


def _seconds(revision: Revision) -> float:
    answer = revision.ask(do="time", least=LEAST)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return float(answer["seconds"])


def environment_of(revision: str) -> Path:
    """Return the interpreter of an environment with the packages of a revision, made if it is not there."""
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not commit:
        raise SystemExit(f"--against {revision}: git knows no such revision; `git log --oneline` lists them")
    folder = ROOT / ".nox" / f"against-{commit[:12]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", folder], check=True)
            packages = [str(path) for path in packages_of(tree)]
            print(f"installing {revision} into {folder}", flush=True)
            pins = ("-c", PINS, "--build-constraint", PINS)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *pins, *packages, "numpy"], check=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    (folder / "complete").touch()
    return python


def packages_of(tree: Path) -> list[Path]:
    """Return what of a tree is measured: everything but the tools, and backends that can't run here."""
    import kpt_core

    idle = {f"kpt-backend-{name}" for name, backend in kpt_core.backends().items() if backend.unavailable()}
    found = sorted(path.parent for path in tree.glob("packages/*/pyproject.toml"))
    needed = [path for path in found if path.name not in LEFT_OUT and path.name not in idle]
    return [path for path in needed if path.name != "kpt-triton" or not idle & {"kpt-backend-nvidia"}]


def main() -> int:
    """Compare and tell; 1 if something is slower beyond noise."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, metavar="REV", help="what git calls the other revision")
    parser.add_argument("-k", action="append", metavar="TEXT", help="in op, case or dtype; of several, all")
    parser.add_argument("--rounds", type=int, default=21, help="timings of each (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="what is no loss (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios to a file")
    options = parser.parse_args()
    if options.rounds < 8:
        parser.error(f"--rounds {options.rounds}: expected 8 at least, or no interval of {CONFIDENCE:.0%} is possible")
    theirs = Revision(environment_of(options.against))
    ours = Revision(Path(sys.executable))
    listed, known = (revision.ask(do="list")["entries"] for revision in (ours, theirs))
    chosen = [entry for entry in listed if all(text in " ".join(entry) for text in options.k or ())]
    ratios, slower = [], []
    for entry in chosen:
        for training in (False, True):
            name = f"{' '.join(entry)} {'forward+backward' if training else 'forward'}"
            if entry not in known:
                print(f"{name}: the other revision has no such case")
                continue
            found = compare(ours, theirs, entry, training, options.rounds)
            if isinstance(found, Ratio) and found.low > 1 + options.tolerance:
                found = compare(ours, theirs, entry, training, 2 * options.rounds)
            if isinstance(found, str):
                print(f"{name}: {found}", flush=True)
                continue
            lost = found.low > 1 + options.tolerance
            print(f"{found}{'  slower' if lost else '  faster' if found.high < 1 else ''}", flush=True)
            ratios.append(found)
            slower += [found] if lost else []
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(ratio) for ratio in ratios], indent=1) + "\n")
    if not ratios:
        print(f"nothing was compared: {len(chosen)} of {len(listed)} entries were chosen")
        return 1
    print(f"{len(ratios)} compared with {options.against}, {len(slower)} slower by more than {options.tolerance:.0%}")
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
