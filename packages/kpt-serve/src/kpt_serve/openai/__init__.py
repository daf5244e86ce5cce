"""Serve a language model by OpenAI's API: transformers' own server and continuous batching, with KPT's kernels.

    from kpt_serve.openai import OpenAIOptions, serve
    serve("SmolLM2-135M", OpenAIOptions(port=8000))

Importing this module imports neither torch nor transformers: a package is checked before they are.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kpt_serve.errors import PackageError
from kpt_serve.listening import listener, warn_of_openness
from kpt_serve.package import Manifest, check, check_machine, verify_signature
from kpt_serve.package.manifest import NAME

from .options import OpenAIOptions

__all__ = ["OpenAIOptions", "serve"]


def serve(folder: str | os.PathLike[str], options: OpenAIOptions | None = None) -> int:
    """Serve the language model in a folder until SIGTERM or SIGINT, and return the exit code.

    Args:
        folder: A package of kind `transformers`, or a plain Hugging Face folder, which nothing vouches for.
        options: How to serve it.

    Raises:
        PackageError: The folder is not what its manifest says, this machine lacks what it needs, or it is no language
            model that continuous batching serves.
        ServeError: The options make no sense, or the port is taken.

    Examples:
        >>> serve("SmolLM2-135M", OpenAIOptions(port=8000))
    """
    options = options or OpenAIOptions()
    options.check()
    place = Path(folder)
    name = _checked(place, options)
    warn_of_openness(options.host, options.token)
    return _run(place, name, options)


def _checked(folder: Path, options: OpenAIOptions) -> str:
    """Return the model's name; nothing of the model is read before its files are known to be right."""
    if options.key is not None:
        verify_signature(folder, options.key)
    if not (folder / NAME).exists():
        if not (folder / "config.json").is_file():
            raise PackageError(f"{folder} is no model; expected a folder with config.json and weights in safetensors")
        return folder.resolve().name
    manifest = Manifest.read(folder)
    if manifest.kind != "transformers":
        raise PackageError(f"{folder} is a {manifest.kind}, not a language model: serve it without --openai")
    check(folder, manifest)
    check_machine(manifest, device_type=options.device_type)
    return manifest.name


def _run(folder: Path, name: str, options: OpenAIOptions) -> int:
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging as told

        from kpt_serve.metrics import server_registry
        from kpt_serve.metrics.generation import GenerationMetrics
        from kpt_serve.package.text_models import LOCAL, load

        from .batching import Generator
        from .server import Api, Server
    except ImportError as error:
        raise PackageError(f"serving needs {error.name}: pip install 'kpt-serve[serve,openai]'") from error
    told.set_verbosity_error()  # type: ignore[no-untyped-call]  # of each request it would write a line

    def prepare() -> tuple[Any, Any, Any, Any]:
        config, model = load(folder, options.device_type)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        registry = server_registry(model)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
            return model, tokenizer, Generator(model, longest, options, GenerationMetrics(registry)), registry
        except MemoryError as error:
            raise PackageError(
                f"{folder}: there is no memory for the keys and values of one request: lower max_prompt or max_tokens"
            ) from error
        except Exception as error:  # transformers raises whatever its tokenizers and caches raise
            raise PackageError(f"{folder} can't be served: {(str(error).splitlines() or [''])[0][:400]}") from error

    # Before the model, which may take minutes, is loaded. Until it is, connections are refused.
    with listener(options.host, options.port) as taken:
        # In a thread that ends: OpenMP's team of a thread that lives counts as busy, and where more threads are busy
        # than there are processors those of the model's own thread sleep after each operation. Decoding was 1.6 times
        # slower.
        with ThreadPoolExecutor(1) as pool:
            model, tokenizer, generator, registry = pool.submit(prepare).result()
        server = Server(Api(name, model, tokenizer, generator, options, registry), options)
        try:
            server.run(sockets=[taken])
        finally:
            generator.batch.stop(block=True, timeout=10, hard_stop=True)
    return 0 if server.started and not server.force_exit else 1
