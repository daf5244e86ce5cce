"""The command: write the tables that the backend ships, or say which are not what the model gives."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kpt_backend_nvidia import BACKEND
from kpt_core.contract import identity
from kpt_core.files import write_whole
from kpt_core.registry import packages_of
from kpt_core.tuning.files import FORMAT, MODELLED, TuningEntry
from kpt_core.tuning.tables import table_name

from .choices import Choice, choices
from .devices import DEVICES
from .readings import read_page

FOLDER = Path(__file__).resolve().parents[2] / "packages/kpt-backend-nvidia/src/kpt_backend_nvidia/tuning"

#: What each op's table entries are for.
_KERNELS = {kernel.op: identity(BACKEND.name, kernel) for kernel in BACKEND.kernels()}
#: Nothing ran, so there is no version of torch and no date; the readings' page and git know when they changed.
_NOT_RUN = "not run"


def run(arguments: Sequence[str]) -> int:
    """Write the tables, or with --check return 1 if one differs; a table with measurements is left alone."""
    parser = argparse.ArgumentParser(prog="python tools/modelled_tuning", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not what it should be")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of the tables (default: the backend's)")
    options = parser.parse_args(arguments)
    wanted = tables()
    there = {path.name: path.read_text(encoding="utf-8") for path in options.out.glob("*.json")}
    measured = {name for name, text in there.items() if _holds_measurements(text)}
    wrong = sorted(name for name in (wanted.keys() | there.keys()) - measured if there.get(name) != wanted.get(name))
    for name in wrong:
        sys.stdout.write(
            f"{name} {'is not what the model gives' if options.check else 'is what the model gives now'}\n"
        )
        if not options.check and name in wanted:
            options.out.mkdir(parents=True, exist_ok=True)
            write_whole(options.out / name, wanted[name])
        elif not options.check:
            (options.out / name).unlink()
    return 1 if options.check and wrong else 0


def _holds_measurements(table: str) -> bool:
    return any(entry.get("method") != MODELLED for entry in json.loads(table)["entries"])


def tables() -> dict[str, str]:
    """The content of each table by its file's name; none for a device whose defaults are the model's choice too."""
    readings = read_page()
    found = {device: choices(device, readings) for device in DEVICES}
    return {table_name(device): _document(device, chosen) for device, chosen in found.items() if chosen}


def _document(device: str, chosen: list[Choice]) -> str:
    lines = ",\n".join(f"  {json.dumps(asdict(_entry(choice)))}" for choice in chosen)
    head = json.dumps({"format": FORMAT, "device": device})
    return f'{head[:-1]}, "entries": [\n{lines}\n]}}\n'


def _entry(choice: Choice) -> TuningEntry:
    kernel = _KERNELS[choice.op]
    distribution, version = packages_of(choice.op)[kernel]
    return TuningEntry(
        op=choice.op,
        dtype="bfloat16",
        key=choice.key,
        kernel=kernel,
        config=dict(choice.config),
        # Rounded, so that another machine's last digits make no difference.
        seconds=float(f"{choice.seconds:.2g}"),
        default=kernel,
        present=(kernel,),
        gain=round(choice.gain, 2),
        noise=0.0,
        case=choice.case,
        distribution=distribution,
        version=version,
        torch=_NOT_RUN,
        date=_NOT_RUN,
        method=MODELLED,
    )
