"""Every op of this package, for the entry point `kpt.ops`."""

from .softcap import softcap

OPS = (softcap,)
