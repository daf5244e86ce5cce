"""A model as a folder that proves itself: `kpt_serve.package` reads and checks it."""

__version__ = "0.1.0"

__all__: list[str] = []
