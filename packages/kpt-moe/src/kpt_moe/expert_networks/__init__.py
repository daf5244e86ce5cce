"""Networks of experts, one kind in each file."""

from .base import ExpertNetwork
from .feed_forward import FeedForwardExpert

__all__ = ["ExpertNetwork", "FeedForwardExpert"]
