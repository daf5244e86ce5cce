"""The installed distributions of KPT, and those that plug into it."""

from importlib.metadata import PackageNotFoundError, distributions, entry_points, version
from typing import NamedTuple

BACKENDS, OPS, REWRITES = GROUPS = ("kpt.backends", "kpt.ops", "kpt.rewrites")


class Package(NamedTuple):
    """A distribution, and its entry points, as in `kpt.backends: nvidia`."""

    name: str
    version: str
    offers: tuple[str, ...]


def packages() -> list[Package]:
    """List the distributions named `kpt-*`, and every other one that has an entry point of ours."""
    offers: dict[tuple[str, str], list[str]] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name and name.lower().startswith("kpt-"):
            offers.setdefault((name, distribution.version), [])
    for group in GROUPS:
        for entry in entry_points(group=group):
            if entry.dist is not None:
                offers.setdefault((entry.dist.name, entry.dist.version), []).append(f"{group}: {entry.name}")
    return [Package(*key, offers=tuple(dict.fromkeys(offered))) for key, offered in sorted(offers.items())]


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
