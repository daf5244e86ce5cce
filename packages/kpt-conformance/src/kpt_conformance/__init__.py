"""The conformance suite: what every kernel of every backend must do before it may be chosen."""

__version__ = "0.1.0"
