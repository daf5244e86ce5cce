"""Steps of an FP8 training engine, as Prometheus counts them."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Engine(Protocol):
    """Describe what is read of a `kpt_fp8.training.FP8TrainingEngine`."""

    steps: int
    skipped: int


class TrainingCollector(Collector):
    """Report the steps that an FP8 training engine tried, and those that it skipped.

    Args:
        engine: A `kpt_fp8.training.FP8TrainingEngine`; it counts by itself, so that a step costs nothing more.

    Examples:
        >>> prometheus_client.REGISTRY.register(TrainingCollector(engine))
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Read the counts."""
        yield CounterMetricFamily("kpt_fp8_steps", "Steps of the optimizer that were tried.", self._engine.steps)
        yield CounterMetricFamily(
            "kpt_fp8_skipped_steps", "Steps that FP8 training skipped: not finite, or saturated.", self._engine.skipped
        )
