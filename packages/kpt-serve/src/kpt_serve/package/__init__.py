"""Packages of models: their manifest and their program, which are checked before torch may run anything of them."""

from kpt_serve.errors import PackageError

from .card import write_card
from .checking import check, check_machine
from .manifest import Dimension, Distribution, File, Manifest, RequiredOp, Tensor, Tolerance, describe_file
from .reading import read_program, scan
from .sbom import write_sbom
from .signing import sign, verify_signature

__all__ = [
    "Dimension",
    "Distribution",
    "File",
    "Manifest",
    "PackageError",
    "RequiredOp",
    "Tensor",
    "Tolerance",
    "check",
    "check_machine",
    "describe_file",
    "read_program",
    "scan",
    "sign",
    "verify_signature",
    "write_card",
    "write_sbom",
]
