"""Requests of a server, as Prometheus counts them."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: Of a small model on an accelerator, which answers within a millisecond, to a long text.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RequestMetrics:
    """Count a server's requests, their time, their batches, and how many wait.

    Args:
        registry: Where the metrics are registered; one server may use it once.

    Raises:
        ValueError: The registry has these metrics already.

    Examples:
        >>> requests = RequestMetrics(server_registry(model))
        >>> requests.waiting(queue.qsize)
        >>> requests.observe("rest", "200", seconds)
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kpt_requests_total", "Requests that were answered.", ["protocol", "code"], registry=registry
        )
        self._seconds = Histogram(
            "kpt_request_duration_seconds",
            "Time from a request's arrival to its answer.",
            ["protocol"],
            buckets=SECONDS,
            registry=registry,
        )
        self._batches = Histogram(
            "kpt_batch_requests", "Requests that one run of the model served.", buckets=REQUESTS, registry=registry
        )
        self._waiting = Gauge("kpt_requests_waiting", "Requests that wait for the model.", registry=registry)

    def observe(self, protocol: str, code: str, seconds: float) -> None:
        """Count an answer.

        Args:
            protocol: `rest`, `grpc` or `openai`.
            code: HTTP's number (`200`, `503`) or gRPC's name (`OK`, `RESOURCE_EXHAUSTED`).
            seconds: From the request's arrival to its answer.
        """
        self._requests.labels(protocol, code).inc()
        self._seconds.labels(protocol).observe(seconds)

    def batch(self, requests: int) -> None:
        """Count a run of the model that served so many requests."""
        self._batches.observe(requests)

    def waiting(self, count: Callable[[], float]) -> None:
        """Read the number of waiting requests from `count` at each scrape, in the thread that scrapes."""
        self._waiting.set_function(count)
