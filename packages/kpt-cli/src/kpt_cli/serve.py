"""The command `kpt serve`: a package that answers requests."""

import logging
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .errors import CliError

#: What of serving is imported before anything is loaded, by the option that asks for it.
_NEEDED = {False: "uvicorn", True: "fastapi"}
_GRACE, _DELAY = "30s", "2ms"
_MAX_TOKENS, _MAX_PROMPT = 1024, 4096
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if found is None:
        raise CliError(f"{option} is {text!r}; expected a number with us, ms or s, as 2ms")
    return float(found[1]) * _UNITS[found[2]]


def serve(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A package of `kpt export`; with --openai also a Hugging Face folder."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; give a token for others than this one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of REST; 0 takes a free one.")] = 8080,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of gRPC; none if left out.", show_default=False)
    ] = None,
    openai: Annotated[
        bool, typer.Option("--openai", help="Serve a language model by OpenAI's API instead of Open Inference.")
    ] = False,
    batch: Annotated[
        int, typer.Option(min=1, help="Most rows that run in one call; with --openai most requests.")
    ] = 32,
    delay: Annotated[str, typer.Option(metavar="TIME", help="Most time that a request waits for others.")] = _DELAY,
    queue: Annotated[int, typer.Option(min=1, help="Most requests that wait; more get 503.")] = 256,
    max_body: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="MB",
            help="Most megabytes of a request; with --openai at most 64 bytes a token of --max-prompt and 4 KiB too.",
        ),
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --openai: most tokens of an answer.")] = _MAX_TOKENS,
    max_prompt: Annotated[int, typer.Option(min=1, help="With --openai: most tokens of a prompt.")] = _MAX_PROMPT,
    settle: Annotated[
        str, typer.Option(metavar="TIME", help="Time between a signal to stop and the last new request.")
    ] = "0s",
    grace: Annotated[str, typer.Option(metavar="TIME", help="Time for accepted requests to end after that.")] = _GRACE,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the token that clients must send; or set KPT_TOKEN.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, a PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's private key.")] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Public key that the package's signature must fit.")
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Serve a program without a signature.")] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Compute each row alone, with the same bits in every batch; slower."),
    ] = False,
    device: Annotated[str, typer.Option("--device-type", help="Where the model runs.")] = "cpu",
) -> None:
    """Serve a package until SIGTERM: REST and gRPC by the Open Inference Protocol v2, or OpenAI's API.

    It listens at once, and is ready (/v2/health/ready) when the golden results of the package were right here. On
    SIGTERM it answers what it accepted. /metrics is for Prometheus. Ends with 1 if results are wrong, 2 for bad input.
    """
    if find_spec("kpt_serve") is None or find_spec(_NEEDED[openai]) is None:
        extras = "serve,openai" if openai else "serve"
        raise CliError(f"kpt serve needs what is not installed: pip install 'kpt-serve[{extras}]'")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, level="WARNING")
    logging.getLogger("kpt_serve").setLevel("INFO")
    if openai and (grpc_port is not None or batch_invariant or unsigned or (grace, delay) != (_GRACE, _DELAY)):
        raise CliError(
            "--grpc-port, --delay, --grace, --unsigned and --batch-invariant are not for --openai: leave them out"
        )
    if not openai and (max_tokens, max_prompt) != (_MAX_TOKENS, _MAX_PROMPT):
        raise CliError("--max-tokens and --max-prompt are for --openai: leave them out, or add it")
    token = _token(token_file)
    for path in (tls_certificate, tls_key, key):
        if path is not None and not path.is_file():
            raise CliError(f"{path} is no file; expected a PEM file")
    from kpt_serve.errors import PackageError, ServeError

    try:
        if openai:
            from kpt_serve.openai import OpenAIOptions
            from kpt_serve.openai import serve as run_openai

            asked = OpenAIOptions(
                host=host,
                port=port,
                token=token,
                tls_certificate=tls_certificate,
                tls_key=tls_key,
                max_tokens=max_tokens,
                max_prompt=max_prompt,
                max_running=batch,
                max_waiting=queue,
                max_body=max_body << 20,
                settle=_seconds("--settle", settle),
                device_type=device,
                key=key,
            )
            code = run_openai(folder, asked)
        else:
            from kpt_serve.oip.server import Options
            from kpt_serve.oip.server import serve as run

            options = Options(
                host=host,
                port=port,
                grpc_port=grpc_port,
                device_type=device,
                batch=batch,
                delay=_seconds("--delay", delay),
                queue=queue,
                largest=max_body << 20,
                settle=_seconds("--settle", settle),
                grace=_seconds("--grace", grace),
                token=token,
                certificate=tls_certificate,
                private_key=tls_key,
                key=key,
                unsigned=unsigned,
                batch_invariant=batch_invariant,
            )
            code = run(folder, options)
    except (PackageError, ServeError) as error:
        raise CliError(str(error)) from error
    raise typer.Exit(code)


def _token(file: Path | None) -> str | None:
    """Return the token, which is no option: others see a process's arguments."""
    if file is None:
        return os.environ.get("KPT_TOKEN")
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--token-file {file} can't be read: {error}") from error
    if not token:
        raise CliError(f"--token-file {file} is empty; expected the token")
    return token
