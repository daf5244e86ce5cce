"""One quick run of the demo, which many tests look at."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from kpt_cli.demo import run
from kpt_cli.main import app


class Run(NamedTuple):
    """What `kpt demo --quick --json` wrote, printed and found out."""

    folder: Path
    printed: Result
    result: dict[str, Any]


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("demo") / "out"
    results = []
    original = run.run_demo

    def noted(*arguments):
        results.append(original(*arguments))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(run, "run_demo", noted)
        printed = CliRunner().invoke(app, ["demo", "--quick", "--json", "-o", str(folder)], prog_name="kpt")
    assert printed.exit_code == 0, printed.output
    return Run(folder, printed, results[0])
