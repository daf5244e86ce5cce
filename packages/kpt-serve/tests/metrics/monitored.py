"""A registry with all collectors, and what happens while it is scraped."""

from types import SimpleNamespace

import torch
from prometheus_client import CollectorRegistry
from torch import nn

from kpt_moe import MoEConfig, MoELayer
from kpt_serve.metrics import RequestMetrics, TrainingCollector, server_registry
from kpt_serve.metrics.generation import GenerationMetrics

EXPERTS = 4


def layer(experts: int = EXPERTS) -> MoELayer:
    torch.manual_seed(0)
    made = MoELayer(MoEConfig(hidden_size=8, num_experts=experts, top_k=2, intermediate_size=8))
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


class Monitored:
    """A server as Prometheus sees it."""

    def __init__(self) -> None:
        self.model = layer()
        self.registry: CollectorRegistry = server_registry(self.model)
        self.engine = SimpleNamespace(steps=0, skipped=0)
        self.registry.register(TrainingCollector(self.engine))
        self.requests = RequestMetrics(self.registry)
        self.requests.waiting(lambda: 3)
        self.texts = GenerationMetrics(self.registry)
        self.texts.counts(lambda: 2, lambda: 1)

    def happen(self) -> None:
        """Serve some requests, none of which fails."""
        with torch.inference_mode():
            self.model(torch.randn(5, 8))
        self.requests.observe("rest", "200", 0.004)
        self.requests.observe("grpc", "OK", 0.002)
        self.requests.batch(2)
        self.texts.started(7)
        self.texts.finished(3, 0.0, (0.1, 0.15, 0.2))
        self.engine.steps += 2
        self.engine.skipped += 1
