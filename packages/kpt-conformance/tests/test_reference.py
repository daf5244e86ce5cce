"""The references of every op, and the layers, pass the suite."""

from kpt_conformance import Suite


class TestReference(Suite):
    backend = "reference"
