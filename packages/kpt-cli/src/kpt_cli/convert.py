"""The command `kpt convert`: a checkpoint in another 8-bit format, quantised for the first time, or in 16 bits."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import print_json, progress, say
from .errors import CliError
from .options import Json, one_of

#: As kpt-fp8 has them, which is not imported to say so.
FORMATS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "torchao")
#: Without quantisation.
PLAIN = ("bfloat16", "float16", "float32")
CODES = ("float8_e4m3fn", "float8_e4m3fnuz")


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="Folder with config.json and weights in safetensors; or GGUF, to widen it."),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, new or empty.")],
    to: Annotated[
        str, one_of("format", (*FORMATS, *PLAIN), f"{', '.join(FORMATS)}; or without FP8 {', '.join(PLAIN)}.")
    ],
    granularity: Annotated[str | None, typer.Option(help="A scale of a weight per tensor, row or 128x128.")] = None,
    activations: Annotated[str | None, typer.Option(help="Likewise per tensor, row or 1x128; or none.")] = None,
    dtype: Annotated[str | None, one_of("dtype", CODES, f"Of the codes: {' or '.join(CODES)}.")] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of modules to leave, beside embeddings, norms, routers and output layers, which always stay; "
            "may be repeated.",
            show_default=False,
        ),
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Quantise anew what the format can't hold with the same numbers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another FP8 format, quantise one that is not, or widen it, and say what is the same.

    What is left out stays as in IN, if the format takes that. OUT appears when all is done, or not at all.
    """
    checkpoints = fp8_checkpoints("kpt convert")
    import torch

    options: dict[str, Any] = {"granularity": granularity, "activations": activations, "requantize": requantize}
    options |= {"dtype": dtype and getattr(torch, dtype), "exclude": exclude or ()}
    with progress() as tell:
        report = checkpoints.convert_checkpoint(source, target, to=to, progress=tell, **options)
    if as_json:
        print_json({"in": str(source), "out": str(target), **report.as_dict()})
    else:
        say(f"{report}\nWrote {target}.")


def fp8_checkpoints(command: str) -> Any:
    """Return the module `kpt_fp8.checkpoints`; `CliError` if the package is not installed."""
    if find_spec("kpt_fp8") is None:
        raise CliError(f"{command} needs kpt-fp8, which is not installed: pip install ./packages/kpt-fp8")
    from kpt_fp8 import checkpoints

    return checkpoints
