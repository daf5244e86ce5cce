"""The program that writes the tuning tables of devices that are not at hand, from a model (docs/tuning.md)."""
