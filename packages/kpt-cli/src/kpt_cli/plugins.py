"""What is installed beside torch: KPT's packages, the plug-ins of others, and the optional third parties."""

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distributions, entry_points, version
from typing import Any

BACKENDS, OPS, REWRITES = GROUPS = ("kpt.backends", "kpt.ops", "kpt.rewrites")
#: Distributions that some part of KPT can use; they are looked up, never imported.
THIRD_PARTIES = (
    "transformers",
    "safetensors",
    "triton",
    "jax",
    "torch-xla",
    "torchax",
    "intel-extension-for-pytorch",
    "flash-attn",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed distribution of KPT, or one that plugs into it.

    Attributes:
        name: of the distribution.
        version: of the distribution.
        offers: its entry points, as in `kpt.backends: nvidia`.
    """

    name: str
    version: str
    offers: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def packages() -> list[Package]:
    """Every distribution named `kpt-*`, and every other one that has an entry point of ours."""
    offers: dict[tuple[str, str], list[str]] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name and name.lower().startswith("kpt-"):
            offers.setdefault((name, distribution.version), [])
    for group in GROUPS:
        for entry in entry_points(group=group):
            if entry.dist is not None:
                offered = offers.setdefault((entry.dist.name, entry.dist.version), [])
                offered.append(f"{group}: {entry.name}")
    return [
        Package(name=name, version=version, offers=tuple(dict.fromkeys(offered)))
        for (name, version), offered in sorted(offers.items())
    ]


def third_parties() -> dict[str, str | None]:
    """Versions of the optional third parties, None for those that are not installed."""
    return {name: installed_version(name) for name in THIRD_PARTIES}


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
