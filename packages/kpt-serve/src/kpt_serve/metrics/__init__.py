"""What a server, or a training process, tells Prometheus about KPT."""

from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from .experts import ExpertCollector
from .kernels import KernelCollector
from .requests import RequestMetrics
from .training import TrainingCollector

__all__ = [
    "ExpertCollector",
    "KernelCollector",
    "RequestMetrics",
    "TrainingCollector",
    "exposition",
    "server_registry",
]


def server_registry(model: Any = None) -> CollectorRegistry:
    """Return a registry of a server's own: its process, KPT's kernels and, if the model has routers, their experts.

    Args:
        model: What is served, a `torch.nn.Module`. Without it, or without kpt-moe, experts are not counted.

    Examples:
        >>> registry = server_registry(model)
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(KernelCollector())
    if (experts := ExpertCollector.of(model)) is not None:
        registry.register(experts)
    return registry


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """Return the body and the content type of an answer to a scrape.

    Args:
        registry: What to report.
        accept: The request's `Accept` header; OpenMetrics is written to those who ask for it.

    Examples:
        >>> body, content_type = exposition(registry, request.headers.get("Accept"))
    """
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
