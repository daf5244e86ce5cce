"""Compare every class of transformers' auto mappings served by KPT with the eager one, and tabulate what came out.

    python tools/families/sweep.py run --subject attention --out reports/families-attention.json
    python tools/families/sweep.py table reports/families-*.json > docs/families.md

A run takes four minutes on one core; it ends with exit code 1 where a class is wrong or fails. The installed version of
transformers is used; `nox -s transformers -- 5.24.0` runs both subjects with another.
"""

import argparse
import importlib
import json
import logging
import multiprocessing
import re
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import compare
import tiny
import torch
import transformers

MOST_SECONDS = 60
#: Outcomes in the order of the table, and what they mean.
MEANINGS = {
    "equal": "KPT served it; outputs, padded and not, with labels, few logits and a static cache, are those of eager",
    "as usual": "not as eager in a case where transformers' own fast implementation isn't either, and equal to that",
    "unused": "it has no such layer, or none was met: equal, and KPT did not run",
    "refused": "KPT says in a sentence what to use",
    "not made": "no tiny model, or no inputs, could be guessed from its settings: not known",
    "error": "fails where eager does not",
    "wrong": "other numbers",
}
FAILURES = ("wrong", "error")


class _Late(Exception):
    pass


def _too_late(*_: Any) -> None:
    raise _Late(f"more than {MOST_SECONDS} s")


def _prepare(subject: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    importlib.import_module({"attention": "kpt_attention.transformers", "experts": "kpt_moe.transformers"}[subject])
    signal.signal(signal.SIGALRM, _too_late)


def _one(asked: tuple[str, str, str]) -> dict[str, Any]:
    name, config, subject = asked
    signal.alarm(MOST_SECONDS)
    try:
        outcome = compare.compare(name, config, subject)
    except (Exception, _Late) as error:
        outcome = compare.Outcome(name, "not made", f"{type(error).__name__}: {error}"[:200])
    finally:
        signal.alarm(0)
    return asdict(outcome)


def run(subject: str, pattern: str, out: Path | None) -> int:
    """Compare the classes whose name a pattern fits; return 1 where one fails."""
    asked = [(name, config, subject) for name, config in tiny.classes().items() if re.search(pattern, name)]
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(initializer=_prepare, initargs=(subject,)) as pool:
        found = []
        for row in pool.imap(_one, asked, chunksize=8):
            found.append(row)
            if row["outcome"] in FAILURES:
                print(f"{row['outcome']}: {row['name']}: {row['told']}", flush=True)
    counts = Counter(row["outcome"] for row in found)
    told = ", ".join(f"{counts[each]} {each}" for each in MEANINGS)
    seconds = time.monotonic() - begin
    print(f"transformers {transformers.__version__}, {subject}: {len(found)} classes in {seconds:.0f} s: {told}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        report = {"transformers": transformers.__version__, "torch": torch.__version__, "subject": subject}
        out.write_text(json.dumps(report | {"classes": found}, indent=0), encoding="utf-8")
    return int(any(counts[each] for each in FAILURES))


def table(files: list[Path]) -> str:
    """Return the page of several runs: their counts, and the families by outcome."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    reports.sort(key=lambda report: (report["subject"], report["transformers"]))
    heads = [f"{report['subject']}, {report['transformers']}" for report in reports]
    counts = [Counter(row["outcome"] for row in report["classes"]) for report in reports]
    configs = tiny.classes()
    lines = [_INTRODUCTION, f"| outcome | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    lines += [f"| {each}: {meaning} | {' | '.join(str(count[each]) for count in counts)} |"
              for each, meaning in MEANINGS.items()]  # fmt: skip
    for subject in dict.fromkeys(report["subject"] for report in reports):
        newest = [report for report in reports if report["subject"] == subject][-1]
        lines += ["", f"## {subject.capitalize()}, with transformers {newest['transformers']}"]
        for outcome in ("refused", "as usual", "equal"):
            named = [row["name"] for row in newest["classes"] if row["outcome"] == outcome]
            families = sorted({configs.get(name, name).removesuffix("Config") for name in named})
            if named:
                told = f"{len(named)} classes of {len(families)} families"
                lines += ["", f"**{outcome.capitalize()}** ({told}): {', '.join(families)}."]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """# Which models of transformers KPT serves

Every class of transformers' auto mappings that a tiny model can be made of was loaded with
`attn_implementation="kpt"`, and with `experts_implementation="kpt"`, and compared with the eager one in float32.
Weights are random: this shows what is computed, not how well a trained model answers. Counts are of classes.
`python tools/families/sweep.py run` repeats it; `nox -s transformers -- 5.24.0` does for another version.

A class that is refused computes attention by code of its own, which no `attn_implementation` reaches: load it with
`"eager"` or `"sdpa"`. Where it is a part of another model, give that one a dictionary:
`attn_implementation={"": "kpt", "vision_config": "eager"}`.
"""


def main() -> int:
    """Run, or tabulate runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="compare classes")
    running.add_argument("--subject", choices=sorted(compare.SUBJECTS), default="attention")
    running.add_argument("-k", dest="pattern", default="", help="a pattern of names")
    running.add_argument("--out", type=Path, help="a JSON file")
    commands.add_parser("table", help="print the page").add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "table":
        print(table(asked.files), end="")
        return 0
    return run(asked.subject, asked.pattern, asked.out)


if __name__ == "__main__":
    sys.exit(main())
