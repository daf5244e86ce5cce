"""Write a package's card: what the model is, what it needs, and how to verify and serve it."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from kpt_serve.errors import PackageError

from .manifest import Manifest, Tensor

#: A folder of transformers may have its author's README.md, which the Hub reads and which is not ours to change; so the
#: card never takes that name there, and an export writes the same files whether the author wrote one or not.
NAMES = {"program": "README.md", "transformers": "KPT.md"}
_KINDS = {
    "program": (
        "A PyTorch model as a program of `torch.export`, with its weights beside it. It runs without the model's "
        "Python code, and KPT chooses the kernels of the machine that it runs on."
    ),
    "transformers": "A model of Hugging Face transformers, with KPT's files beside the model's own.",
}
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

{{ kind }}

It runs on {{ device_types }}, and computes in {{ dtypes }}.

## Inputs

{{ inputs }}

## Outputs

{{ outputs }}

## What it needs

{{ needs }}

## How exact it is

Errors are those against the reference in `golden.safetensors`, in multiples of the mean size of its numbers.
`kpt export --verify` computes the results again, and passes if the mean error is at most {{ mean }} times the
exporter's, and the largest at most {{ max }} times; an error of one rounding is always allowed.

{{ errors }}

## Verify it

```console
$ kpt export --verify {{ folder }}
$ kpt export --verify {{ folder }} --key key.pub.pem     # its signature too, if it has one (model.sig)
```

`kpt-package.json` lists every file with its SHA-256.
"""


def write_card(
    folder: str | os.PathLike[str], manifest: Manifest, *, errors: Mapping[str, tuple[float, float]] | None = None
) -> Path:
    """Write a package's card and return its path: `README.md`, or `KPT.md` in a folder of transformers.

    Args:
        folder: The package.
        manifest: What the card says of the model; its files need not be listed yet.
        errors: The exporter's mean and largest error of each output, as the golden file has them.

    Raises:
        PackageError: huggingface_hub is not installed.
    """
    try:
        import jinja2  # noqa: F401 - from_template uses it, and huggingface_hub doesn't ask for it
        from huggingface_hub import ModelCard, ModelCardData
    except ImportError as error:
        raise PackageError(f"a card needs {error.name}: pip install 'kpt-serve[card]'") from error

    is_program = manifest.kind == "program"
    data = ModelCardData(
        library_name="kpt-serve" if is_program else "transformers",
        tags=["kpt", "pytorch", "torch.export"] if is_program else ["kpt"],
    )
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=manifest.name,
        kind=_KINDS[manifest.kind],
        device_types=", ".join(manifest.device_types),
        dtypes=", ".join(manifest.dtypes),
        inputs=_list(*map(_describe, manifest.inputs)),
        outputs=_list(*map(_describe, manifest.outputs)),
        needs=_list(
            *(f"{each.name} `{each.versions}`" for each in manifest.distributions),
            *(f"op `{op.name}` of {op.distribution} `{op.versions}`" for op in manifest.ops),
        ),
        mean=f"{manifest.tolerance.mean:g}",
        max=f"{manifest.tolerance.max:g}",
        errors=_list(
            *(f"`{name}`: mean error {mean:.3g}, largest {most:.3g}" for name, (mean, most) in (errors or {}).items())
        ),
        folder=shlex.quote(manifest.name),
    )
    path = Path(folder, NAMES[manifest.kind])
    card.save(path)
    return path


def _list(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines) or "None is recorded."


def _describe(tensor: Tensor) -> str:
    """Return a tensor's name, type and sizes, as `x`: FP32, shape (1 to 64) x 4."""
    ranges = {each.axis: f"({each.min} {f'to {each.max}' if each.max is not None else 'or more'})"
              for each in tensor.dynamic}  # fmt: skip
    sizes = " x ".join(ranges.get(axis, str(size)) for axis, size in enumerate(tensor.shape))
    return f"`{tensor.name}`: {tensor.datatype}, {f'shape {sizes}' if sizes else 'one value'}"
