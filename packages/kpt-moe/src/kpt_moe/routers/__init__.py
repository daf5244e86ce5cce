"""Routers, one family in each file."""

from .base import LinearRouter, Router
from .top_k import SCORES, TopKRouter

__all__ = ["SCORES", "LinearRouter", "Router", "TopKRouter"]
