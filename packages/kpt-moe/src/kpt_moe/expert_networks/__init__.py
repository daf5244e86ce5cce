"""Networks of experts, one kind in each file."""

from .attention import AttentionExpert
from .base import ExpertNetwork
from .convolutional import ConvolutionalExpert
from .feed_forward import FeedForwardExpert
from .parameter_efficient import ParameterEfficientExpert
from .quantized import QuantizedFeedForwardExpert

#: Kinds of experts, by the name that `MoEConfig` gives them.
EXPERTS: dict[str, type[ExpertNetwork]] = {
    "attention": AttentionExpert,
    "convolutional": ConvolutionalExpert,
    "feed_forward": FeedForwardExpert,
    "parameter_efficient": ParameterEfficientExpert,
}

__all__ = [
    "EXPERTS",
    "AttentionExpert",
    "ConvolutionalExpert",
    "ExpertNetwork",
    "FeedForwardExpert",
    "ParameterEfficientExpert",
    "QuantizedFeedForwardExpert",
]
