"""Load a checked model folder with transformers: from local files, from safetensors, running no code of the model's."""

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kpt_cli.errors import CliError, sentence

from .model_directory import CONFIG, ModelDirectory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def load_model(directory: ModelDirectory, dtype: str, device: "torch.device") -> "PreTrainedModel":
    """Load the model that the config names, in evaluation mode, on a device.

    Args:
        directory: the folder.
        dtype: of the weights; `auto` takes the config's.
        device: where the model goes.

    Raises:
        CliError: transformers does not know the architecture, or the weights do not fit it.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what matters is said by the errors below
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = _load_config(directory)
    cls, options = _model_class(directory)
    try:
        model, info = cls.from_pretrained(
            directory.path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise _as_sentence(error, f"{directory.path} could not be loaded as {cls.__name__}") from error
    _check_complete(directory, info)
    if model.main_input_name != "input_ids":
        raise CliError(
            f"{directory.path} is a {type(model).__name__}, which reads {model.main_input_name}; expected a language "
            "model, which reads token ids"
        )
    return model.eval().to(device)  # type: ignore[no-any-return]


def _load_config(directory: ModelDirectory) -> "PreTrainedConfig":
    from transformers import AutoConfig, __version__
    from transformers.models.auto import configuration_auto

    known: Mapping[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    model_type = directory.config["model_type"]
    if model_type not in known:
        if "auto_map" in directory.config:
            raise CliError(
                f"{directory.path} brings its own Python code for model type {model_type!r}, which is never run; "
                f"expected an architecture of transformers {__version__}"
            )
        near = difflib.get_close_matches(model_type, known, n=3, cutoff=0.6)
        offer = f"did you mean {' or '.join(near)}?" if near else "a newer transformers may know it"
        raise CliError(
            f"{directory.path / CONFIG} names the model type {model_type!r}, which transformers {__version__} does not "
            f"know; {offer}"
        )
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        return AutoConfig.from_pretrained(directory.path, **options)  # type: ignore[no-any-return]
    except Exception as error:
        raise _as_sentence(error, f"{directory.path / CONFIG} is not a valid {model_type} config") from error


def _model_class(directory: ModelDirectory) -> tuple[Any, dict[str, Any]]:
    """The class that the config names if transformers has it, else the one for its causal language models."""
    import transformers

    named = getattr(transformers, directory.architecture or "", None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named, {}
    return transformers.AutoModelForCausalLM, {"trust_remote_code": False}


def _check_complete(directory: ModelDirectory, info: dict[str, Any]) -> None:
    missing = sorted(map(str, info.get("missing_keys", ())))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CliError(
            f"the weights in {directory.path} lack {len(missing)} of the model's tensors ({shown}), which would be "
            f"random; expected the weights that belong to its {CONFIG}; fetch both again"
        )


def _as_sentence(error: Exception, what: str) -> Exception:
    if not isinstance(error, OSError | ValueError) and sentence(error) is not None:
        return error  # out of memory and the like speak for themselves
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return CliError(f"{what}: {' '.join(lines)[:400]}")
