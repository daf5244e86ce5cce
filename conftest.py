"""An option of pytest for quick runs: of a test with several parameters, every value instead of every combination."""

from collections import defaultdict

import pytest

Value = tuple[str, tuple[int, ...]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    described = "of a test with several parameters, run as few combinations as have every value of each parameter"
    parser.addoption("--each-value", action="store_true", help=described)


def _values(item: pytest.Item) -> set[Value]:
    """Return what each `parametrize`, and each fixture with parameters, has given a test."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    together: dict[str, str] = {}
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0].replace(" ", "").split(",") if isinstance(marker.args[0], str) else marker.args[0]
        together |= dict.fromkeys(names, ",".join(names))
    found: dict[str, list[int]] = defaultdict(list)
    for name, value in sorted(params.items()):
        found[together.get(name, name)].append(id(value))
    return {(names, tuple(values)) for names, values in found.items()}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations all of whose values others have."""
    if not config.getoption("--each-value"):
        return
    tests: dict[str, list[tuple[pytest.Item, set[Value]]]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append((item, _values(item)))
    kept: set[pytest.Item] = set()
    for rows in tests.values():
        kept.add(rows[0][0])
        missing = set().union(*(values for _, values in rows)) - rows[0][1]
        while missing:
            item, values = max(rows, key=lambda row: len(row[1] & missing))
            kept.add(item)
            missing -= values
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
