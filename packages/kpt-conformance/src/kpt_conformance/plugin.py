"""The pytest plugin: options, and the parameters of the suite's tests."""

from pathlib import Path

import pytest

from .interpreter import prepare_once
from .outcomes import Outcomes

STANDALONE = Path(__file__).with_name("standalone.py")
BENCHMARKS = Path(__file__).with_name("standalone_bench.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    option = parser.getgroup("kpt", "KPT conformance").addoption
    told = "try every kernel of this backend, or every reference with `reference`; without paths, only that is run"
    option("--kpt-backend", metavar="NAME", help=told)
    told = "where to run; on a device of another type than the backend's, kernels are forced to run"
    option("--kpt-device", metavar="DEVICE", help=told)
    told = "tests that are expected to fail, for the backend of --kpt-backend; else xfails.txt beside a test file"
    option("--kpt-xfails", metavar="FILE", type=Path, help=told)
    told = "write what the run showed of each kernel: date, commit, device, and how its checks ended, as JSON"
    option("--kpt-report", metavar="FILE", type=Path, help=told)
    told = "write what the run exercised of each kernel's op, and how often, as JSON"
    option("--kpt-coverage", metavar="FILE", type=Path, help=told)
    told = "few trials of each check and kernel, in under two minutes: for while you write a kernel"
    option("--kpt-quick", action="store_true", help=told)
    told = "what --kpt-quick leaves out if it has not begun by then; 0 leaves out nothing (100)"
    # Collecting and the last test come on top.
    option("--kpt-quick-seconds", metavar="SECONDS", type=float, default=100.0, help=told)
    told = "how many trials of each check and kernel --kpt-quick has at most (6)"
    option("--kpt-quick-trials", metavar="NUMBER", type=int, default=6, help=told)
    option("--kpt-quick-values", action="store_true", help="with --kpt-quick, every case of the check values")
    told = "with --kpt-quick, twice as many trials of kernels whose names have this, as they changed; may be repeated"
    option("--kpt-quick-changed", metavar="NAME", action="append", default=[], help=told)
    told = "measure the kernels of --kpt-backend with pytest-benchmark, on real models' shapes; nothing else is run"
    option("--kpt-bench", action="store_true", help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Run the suite alone if a backend is named and no path."""
    if config.getoption("--kpt-backend"):
        prepare_once()
        # Where warnings are errors, each test would fail of a name that is not installed here.
        config.addinivalue_line("filterwarnings", "ignore:.*in KPT_DISABLE, where it has no effect")
    chosen_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    if config.getoption("--kpt-backend") and not chosen_paths:
        config.args = [str(STANDALONE)]
    if config.getoption("--kpt-bench"):
        _measure(config)
    report: Path | None = config.getoption("--kpt-report")
    if report is not None and not report.absolute().parent.is_dir():
        raise pytest.UsageError(f"--kpt-report: there is no folder {str(report.absolute().parent)!r}; make it first")
    coverage: Path | None = config.getoption("--kpt-coverage")
    if coverage is not None and config.getoption("numprocesses", default=None):
        raise pytest.UsageError("--kpt-coverage needs every test in one process: leave out -n")
    config.pluginmanager.register(Outcomes(report, coverage), "kpt-outcomes")
    if config.getoption("--kpt-quick"):
        from .quick import Quick

        often = [config.getoption(f"--kpt-quick-{name}") for name in ("seconds", "trials")]
        more = {name: config.getoption(f"--kpt-quick-{name}") for name in ("values", "changed")}
        config.pluginmanager.register(Quick(*often, **more), "kpt-quick")


def _measure(config: pytest.Config) -> None:
    if not config.getoption("--kpt-backend"):
        raise pytest.UsageError("--kpt-bench needs --kpt-backend=NAME, whose kernels it measures")
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError('--kpt-bench needs pytest-benchmark: pip install "./packages/kpt-conformance[bench]"')
    config.args = [str(BENCHMARKS)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cross a check with subjects, cases and dtypes."""
    # Other tests than the suite's are left alone, and torch unimported.
    if getattr(metafunc.cls, "is_kpt_suite", False):
        from .generation import parametrize

        _require_answers(metafunc.config)
        parametrize(metafunc)
    elif getattr(metafunc.cls, "is_kpt_benchmark", False):
        from . import benchmarks

        benchmarks.parametrize(metafunc)


def _require_answers(config: pytest.Config) -> None:
    """End the run with one line if the backend of `--kpt-backend` raises where it is asked."""
    import kpt_core
    from kpt_core.errors import describe_error

    backend = kpt_core.backends().get(config.getoption("--kpt-backend") or "")
    for question in ("unavailable", "kernels") if backend is not None else ():
        try:
            getattr(backend, question)()
        except Exception as error:
            told = f"backend {config.getoption('--kpt-backend')}: {question}() raised {describe_error(error)}"
            raise pytest.Collector.CollectError(told) from None  # of which pytest shows the line alone


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is expected to fail; refuse entries that no test bears."""
    if any(getattr(getattr(item, "cls", None), "is_kpt_suite", False) for item in items):
        from .generation import expect_failures

        expect_failures(config, items)
