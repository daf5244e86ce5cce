"""Generated text, as Prometheus counts it: names and buckets are vLLM's, so that its dashboards serve here too."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class GenerationMetrics:
    """Count prompts and generated tokens, and the time that they take.

    Args:
        registry: Where the metrics are registered; one server may use it once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._first = histogram("kpt_time_to_first_token_seconds", "Time from a request to its first token.", FIRST)
        self._between = histogram("kpt_inter_token_latency_seconds", "Time between a request's tokens.", BETWEEN)
        self._whole = histogram("kpt_e2e_request_latency_seconds", "Time from a request to its last token.", WHOLE)
        self._running = Gauge("kpt_num_requests_running", "Requests in the batch.", registry=registry)
        self._waiting = Gauge("kpt_num_requests_waiting", "Requests that wait for the batch.", registry=registry)
        self._prompts = Counter("kpt_prompt_tokens_total", "Tokens of prompts.", registry=registry)
        self._generated = Counter("kpt_generation_tokens_total", "Tokens that were generated.", registry=registry)

    def counts(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read how many requests run and wait from these at each scrape, in the thread that scrapes."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def started(self, prompt: int) -> None:
        """Count a prompt of so many tokens."""
        self._prompts.inc(prompt)

    def finished(self, tokens: int, start: float, times: Sequence[float]) -> None:
        """Count a request that is answered.

        Args:
            tokens: How many were generated.
            start: When it came.
            times: When each token came; those of a request that was interrupted and resumed may be fewer.
        """
        self._generated.inc(tokens)
        if times:
            self._whole.observe(times[-1] - start)
            if len(times) == tokens:
                self._first.observe(times[0] - start)
            for before, after in pairwise(times):
                self._between.observe(after - before)
