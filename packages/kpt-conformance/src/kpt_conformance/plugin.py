"""The pytest plugin: options, and the parameters of the suite's tests."""

from pathlib import Path

import pytest

from .interpreter import prepare_once

STANDALONE = Path(__file__).with_name("standalone.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("kpt", "KPT conformance")
    group.addoption(
        "--kpt-backend",
        metavar="NAME",
        help="try every kernel of this backend, or every reference with `reference`; without paths, only that is run",
    )
    group.addoption(
        "--kpt-device",
        metavar="DEVICE",
        help="where to run; on a device of another type than the backend's, kernels are forced to run",
    )
    group.addoption(
        "--kpt-xfails",
        metavar="FILE",
        type=Path,
        help="tests that are expected to fail, for the backend of --kpt-backend; else xfails.txt beside a test file",
    )
    group.addoption(
        "--kpt-evidence",
        metavar="FOLDER",
        type=Path,
        help="write a record of every kernel that passes the whole suite",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Run the suite alone if a backend is named and no path."""
    if config.getoption("--kpt-backend"):
        prepare_once()
    chosen_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    if config.getoption("--kpt-backend") and not chosen_paths:
        config.args = [str(STANDALONE)]
    if config.getoption("--kpt-evidence"):
        if config.getoption("numprocesses", default=None):
            raise pytest.UsageError("--kpt-evidence needs every test in one process: leave out -n")
        from .ledger import Ledger

        config.pluginmanager.register(Ledger(config.getoption("--kpt-evidence")), "kpt-evidence")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cross a check with subjects, cases and dtypes."""
    # Other tests than the suite's are left alone, and torch unimported.
    if getattr(metafunc.cls, "is_kpt_suite", False):
        from .generation import parametrize

        parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is expected to fail; refuse entries that no test bears."""
    if any(getattr(getattr(item, "cls", None), "is_kpt_suite", False) for item in items):
        from .xfails import expect_failures

        expect_failures(config, items)
