"""Calls of KPT's kernels, as Prometheus counts them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ("op", "kernel", "backend")


class KernelCollector(Collector):
    """Report which kernels served KPT's ops in this process, which of them raised, and which KPT no longer calls.

    Everything is read when Prometheus scrapes; a call of an op costs nothing more. The counts are those of
    `kpt_core.counts()`: what a compiler fused and backward passes are not in them.

    Examples:
        >>> prometheus_client.REGISTRY.register(KernelCollector())  # in a training process of your own
        >>> prometheus_client.start_http_server(9400)
    """

    def describe(self) -> Iterator[Metric]:
        """Name the metrics, so that registering needs no torch."""
        return iter(self._families())

    def collect(self) -> Iterator[Metric]:
        """Read the counts."""
        import torch

        import kpt_core

        calls, failures, quarantined, accelerators = families = self._families()
        accelerators.add_metric((), torch.accelerator.device_count())
        for each in kpt_core.counts():
            labels = (each.op, each.identity, each.backend)
            calls.add_metric(labels, each.calls)
            failures.add_metric(labels, each.failures)
            quarantined.add_metric(labels, each.quarantined)
        return iter(families)

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
        return (
            CounterMetricFamily("kpt_kernel_calls", "Calls of an op that this kernel served.", labels=_LABELS),
            CounterMetricFamily("kpt_kernel_failures", "Calls in which this kernel raised.", labels=_LABELS),
            GaugeMetricFamily(
                "kpt_kernel_quarantined", "1 if KPT no longer calls this kernel, because it raised.", labels=_LABELS
            ),
            GaugeMetricFamily("kpt_accelerators", "Accelerators that torch sees.", labels=()),
        )
