"""The command `kpt serve`: its options reach the server, and what is wrong ends as one sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kpt_serve.oip.server
import kpt_serve.openai
from kpt_cli.main import app
from kpt_serve.errors import PackageError, ServeError
from kpt_serve.oip.server import Options
from kpt_serve.openai import OpenAIOptions


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the servers were asked to do."""
    calls: list[Any] = []

    def serve(folder: Path, options: Any) -> int:
        calls.append((folder, options))
        return 7

    monkeypatch.setattr(kpt_serve.oip.server, "serve", serve)
    monkeypatch.setattr(kpt_serve.openai, "serve", serve)
    return calls


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ((), {}),
        (("--host", "0.0.0.0", "--port", "1", "--grpc-port", "2"), {"host": "0.0.0.0", "port": 1, "grpc_port": 2}),
        (("--batch", "3", "--delay", "500us", "--queue", "4"), {"batch": 3, "delay": 0.0005, "queue": 4}),
        (("--max-body", "2", "--settle", "1.5s", "--grace", "3s"), {"largest": 2 << 20, "settle": 1.5, "grace": 3.0}),
        (("--unsigned", "--batch-invariant"), {"unsigned": True, "batch_invariant": True}),
        (("--device-type", "cuda"), {"device_type": "cuda"}),
    ],
)
def test_options_reach_the_server(arguments: tuple[str, ...], changes: dict[str, Any], asked: list[Any]) -> None:
    code, _ = run("toy", *arguments)
    assert code == 7
    assert asked == [(Path("toy"), replace(Options(), **changes))]


def test_options_reach_the_server_of_language_models(asked: list[Any]) -> None:
    run("smol", "--openai", "--max-tokens", "5", "--max-prompt", "6", "--batch", "2", "--queue", "3", "--settle", "1s")
    (folder, options), *_ = asked
    expected = OpenAIOptions(port=8080, max_tokens=5, max_prompt=6, max_running=2, max_waiting=3, settle=1.0)
    assert (folder, options) == (Path("smol"), replace(expected, max_body=64 << 20))


@pytest.mark.parametrize("openai", [(), ("--openai",)])
def test_the_token_comes_from_a_file_or_the_environment(
    openai: tuple[str, ...], tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("from a file\n")
    monkeypatch.setenv("KPT_TOKEN", "from the environment")
    run("toy", *openai)
    run("toy", *openai, "--token-file", str(file))
    assert [options.token for _, options in asked] == ["from the environment", "from a file"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--delay", "2"), "--delay is '2'; expected a number with us, ms or s, as 2ms"),
        (("--token-file", "nowhere"), "--token-file nowhere can't be read"),
        (("--token-file", "/dev/null"), "--token-file /dev/null is empty; expected the token"),
        (("--tls-key", "nowhere"), "nowhere is no file; expected a PEM file"),
        (("--max-prompt", "9"), "--max-tokens and --max-prompt are for --openai"),
        (("--max-tokens", "9"), "--max-tokens and --max-prompt are for --openai"),
        (("--openai", "--grace", "3s"), "--delay, --grace, --unsigned and --batch-invariant are not for --openai"),
        (("--openai", "--delay", "9ms"), "--delay, --grace, --unsigned and --batch-invariant are not for --openai"),
    ],
)
def test_wrong_options_are_told(arguments: tuple[str, ...], text: str, asked: list[Any]) -> None:
    code, output = run("toy", *arguments)
    assert code == 2
    assert text in " ".join(output.split())
    assert asked == []


@pytest.mark.parametrize("error", [PackageError, ServeError])
def test_errors_are_sentences(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(folder: Path, options: Any) -> int:
        raise error("port 1 is taken")

    monkeypatch.setattr(kpt_serve.oip.server, "serve", serve)
    code, output = run("toy")
    assert code == 2
    assert "error: port 1 is taken" in output
