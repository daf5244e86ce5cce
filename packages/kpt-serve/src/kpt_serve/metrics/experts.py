"""Load of a model's experts, as Prometheus counts it."""

from collections import deque
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from time import monotonic
from typing import Any, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kpt_serve.errors import PackageError

#: Of more experts each one is no series of its own: with 60 layers of 256 they would be 15,360.
MOST_EXPERTS = 64
#: Seconds over which imbalance is taken. Over all of a server's life, a collapse of today would not show.
WINDOW = 300.0


class ExpertCollector(Collector):
    """Report what the experts of a model are asked for: KPT's layers, and models of transformers.

    Each layer counts on its device, in a few small kernels; numbers are read when Prometheus scrapes, which waits for
    the device. Compiled code counts too: what was compiled before is compiled again.

    Args:
        model: A `torch.nn.Module` with routers of kpt-moe or experts of transformers.

    Raises:
        PackageError: kpt-moe, which counts, is not installed.
        kpt_core.InputError: The model has no such module.

    Examples:
        >>> experts = ExpertCollector(model)
        >>> prometheus_client.REGISTRY.register(experts)
        >>> experts.detach()  # stop counting
    """

    def __init__(self, model: Any) -> None:
        if find_spec("kpt_moe") is None:
            raise PackageError("kpt-moe counts the load of experts; it is not installed: pip install kpt-moe")
        self._statistics = import_module("kpt_moe.statistics").RouterStatistics(model)
        self._past: deque[tuple[float, dict[str, tuple[int, ...]]]] = deque([(monotonic(), {})])
        self._lock = Lock()  # two may scrape at once

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Count the experts of a model, or return None where it has none or kpt-moe is not installed."""
        if model is None or find_spec("kpt_moe") is None:
            return None
        import kpt_core

        try:
            return cls(model)
        except kpt_core.InputError:  # it has no router
            return None

    def detach(self) -> None:
        """Stop counting; what was counted is still reported. Doing it twice does no harm."""
        self._statistics.detach()

    def describe(self) -> Iterator[Metric]:
        """Name the metrics, so that registering does not wait for a device."""
        return iter(self._families())

    def collect(self) -> Iterator[Metric]:
        """Read the counts."""
        tokens, dropped, imbalance = families = self._families()
        summaries = self._statistics.snapshot()
        before = self._before({router: each.asked for router, each in summaries.items()})
        for router, each in summaries.items():
            dropped.add_metric((router,), each.dropped)
            recent = [
                now - old for now, old in zip(each.asked, before.get(router, (0,) * len(each.asked)), strict=True)
            ]
            imbalance.add_metric((router,), max(recent) * len(recent) / max(sum(recent), 1))
            if len(each.asked) <= MOST_EXPERTS:
                for expert, count in enumerate(each.asked):
                    tokens.add_metric((router, str(expert)), count)
        return iter(families)

    def _before(self, now: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the counts at the start of the window."""
        with self._lock:
            time = monotonic()
            # One that is older than the window stays, for those who scrape less often.
            while len(self._past) > 1 and self._past[1][0] <= time - WINDOW:
                self._past.popleft()
            # About a hundred are enough, and who scrapes all the time must not fill the memory.
            if len(self._past) > 1 and time - self._past[-1][0] < WINDOW / 100:
                time = self._past.pop()[0]
            self._past.append((time, now))
            return self._past[0][1]

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily]:
        return (
            CounterMetricFamily(
                "kpt_moe_expert_tokens",
                f"Tokens that asked for an expert, before capacity; of routers with up to {MOST_EXPERTS} experts.",
                labels=("router", "expert"),
            ),
            CounterMetricFamily(
                "kpt_moe_dropped_choices", "Choices that were refused for want of capacity.", labels=("router",)
            ),
            GaugeMetricFamily(
                "kpt_moe_load_imbalance_ratio",
                "Tokens of the busiest expert over the mean, in the last 5 minutes: 1 is balance, 0 is no token.",
                labels=("router",),
            ),
        )
