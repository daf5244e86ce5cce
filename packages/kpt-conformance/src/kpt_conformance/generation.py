"""The parameters of the suite's tests, and which of them are expected to fail."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kpt_core
from kpt_core import InputError, UnknownNameError
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import layer_cases

from .checks.catalog import CHECKS, DECLARATIONS, DEVICE_CHECKS
from .extent import extent_of
from .layers import LAYER_CHECKS
from .subject import Subject
from .suite import Suite, device_of, subjects, trials
from .trial import Trial

#: Ids of tests, and the values of their parameters.
Made = Iterable[tuple[str, tuple[Any, ...]]]
#: Class -> test -> ids such as `values-moe.experts-reference-small-float32`, and what is tried there.
GENERATED = pytest.StashKey[dict[type, dict[str, dict[str, Subject | None]]]]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a test of the suite its parameters."""
    if metafunc.cls is None or metafunc.function.__name__ not in MAKERS:
        return
    names, make = MAKERS[metafunc.function.__name__]
    try:
        backend, reason = _backend(metafunc)
        if reason is not None:
            skipped = pytest.param(*[None] * len(names), marks=pytest.mark.skip(reason=reason))
            metafunc.parametrize(names, [skipped], ids=[backend])
            return
        made = _unique(make(backend, _device(metafunc)))
    except (UnknownNameError, InputError) as error:
        if hasattr(metafunc.config, "workerinput"):
            raise pytest.UsageError(str(error)) from None
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)  # one line, where an error shows pytest's code
    metafunc.parametrize(names, list(made.values()), ids=list(made))
    generated = metafunc.config.stash.setdefault(GENERATED, {}).setdefault(metafunc.cls, {})
    generated[metafunc.function.__name__] = {name: _subject(values) for name, values in made.items()}


def _backend(metafunc: pytest.Metafunc) -> tuple[str, str | None]:
    """Return the backend that a class is for, and why it is not tried, or None."""
    asked: str | None = metafunc.config.getoption("--kpt-backend")
    assert metafunc.cls is not None
    name = metafunc.cls.backend or asked
    if name is None:
        raise pytest.UsageError(f"{metafunc.cls.__name__} names no backend: set `backend`, or pass --kpt-backend=NAME")
    if asked not in (None, name):
        return name, f"--kpt-backend={asked}"
    found = kpt_core.backends().get(name)
    device = _device(metafunc)
    # Where its kernels are forced to run on a device of another type, the backend's own need not be there.
    own = found is not None and (device is None or found.serves(device_of(device).type))
    unavailable = found.unavailable() if found is not None and own else None
    if unavailable and asked:
        raise pytest.UsageError(f"backend {name} can't run here: {unavailable}")
    return name, unavailable


def _device(metafunc: pytest.Metafunc) -> str | None:
    device: str | None = metafunc.config.getoption("--kpt-device") or getattr(metafunc.cls, "device", None)
    return device


def _subject(values: tuple[Any, ...]) -> Subject | None:
    tried = (value.subject if isinstance(value, Trial) else value for value in values)
    return next((value for value in tried if isinstance(value, Subject)), None)


def _unique(made: Made) -> dict[str, tuple[Any, ...]]:
    unique: dict[str, tuple[Any, ...]] = {}
    for name, values in made:
        if name in unique:
            told = "give each kernel of an op a forward, each case a name of its own"
            raise InputError(f"two tests are called {name}: {told}")
        unique[name] = values
    return unique


def _crossed(checks: Iterable[Callable[[Trial], None]], backend: str, device: str | None) -> Made:
    for check in checks:
        for subject, table in subjects(backend, device):
            for trial in trials(subject, table, extent_of(check)):
                yield f"{check.__name__}-{trial}", (check, trial)


def _declarations(backend: str, device: str | None) -> Made:
    for declared in DECLARATIONS:
        for subject, table in subjects(backend, device):
            yield f"{declared.__name__}-{subject}", (declared, subject, table)


def _wrong(backend: str, device: str | None) -> Made:
    for subject, table in subjects(backend, device):
        for wrong in table.wrong:
            yield f"wrong_input-{subject}-{wrong.name}", (subject, table, wrong)


def _layers(backend: str, device: str | None) -> Made:
    if backend == REFERENCE:
        for name, check in LAYER_CHECKS.items():
            for layer in layer_cases().values():
                yield f"{name}-{layer.name}", (check, layer)


def _tables(backend: str, device: str | None) -> Made:
    if backend == REFERENCE:
        for subject, table in subjects(backend, device):
            if table.domain is not None:
                yield f"coverage-{subject.op.name}", (table,)


#: The tests of the suite: their parameters, and what makes those.
MAKERS: dict[str, tuple[tuple[str, ...], Callable[[str, str | None], Made]]] = {
    "test_kernel": (("check", "trial"), lambda *where: _crossed(CHECKS, *where)),
    "test_declaration": (("declared", "subject", "table"), _declarations),
    "test_wrong_input": (("subject", "table", "wrong"), _wrong),
    "test_device": (("device_check", "trial"), lambda *where: _crossed(DEVICE_CHECKS, *where)),
    "test_coverage": (("table",), _tables),
    "test_layer": (("layer_check", "layer"), _layers),
}


@dataclass(frozen=True, slots=True)
class _Expected:
    """A line of the file: `values-moe.grouped_mm-pkg.mod:kernel-small-bfloat16  # reason`; `*` stands for anything."""

    place: str
    pattern: str
    reason: str

    def matches(self, test: str) -> bool:
        """Return whether the line is for the test of that id."""
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), test) is not None


def _read(path: Path) -> list[_Expected]:
    """Return the lines of a file of expected failures; each must have a reason."""
    expected = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        pattern, _, reason = map(str.strip, line.partition("#"))
        if pattern and not reason:
            raise pytest.UsageError(f"{path}:{number}: {pattern!r} has no reason; write `{pattern}  # why`")
        if pattern:
            expected.append(_Expected(f"{path}:{number}", pattern, reason))
    return expected


def expect_failures(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that are expected to fail, strictly: one that passes fails, and so does a line that is for no test."""
    for cls, generated in config.stash.get(GENERATED, {}).items():
        path = _file_of(config, cls)
        if path is None:
            continue
        expected = _read(path)
        if generated.keys() == MAKERS.keys():  # else only some tests were asked for
            ids = {name for made in generated.values() for name in made}
            for line in expected:
                if not any(map(line.matches, ids)):
                    raise pytest.UsageError(f"{line.place}: {line.pattern!r} is the id of no test; delete the line")
        for item in items:
            if isinstance(item, pytest.Function) and item.cls is cls and hasattr(item, "callspec"):
                for line in expected:
                    if line.matches(item.callspec.id):
                        item.add_marker(pytest.mark.xfail(reason=line.reason, strict=True))


def _file_of(config: pytest.Config, cls: type[Suite]) -> Path | None:
    """Return the file that is named on the command line, or that lies beside the class's own."""
    asked: Path | None = config.getoption("--kpt-xfails")
    if asked is not None:
        if not asked.is_file():
            raise pytest.UsageError(f"--kpt-xfails={asked}: there is no such file")
        return asked
    beside = Path(inspect.getfile(cls)).with_name("xfails.txt")
    return beside if beside.is_file() else None
