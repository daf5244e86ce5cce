"""Hold the documents to what they promise: code runs, links lead somewhere, quoted sentences are in the source."""

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import plot_smollm
import pytest
import typer
from public_names import PAGES
from typer.core import TyperGroup

from kpt_cli.main import app

ROOT = Path(__file__).parents[1]
HIDDEN = {".git", ".nox", ".venv", ".kpt", ".cache"}
SENTENCES = ROOT / "docs/troubleshooting.md"
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not HIDDEN & set(path.relative_to(ROOT).parts))
RUNNER = ROOT / "tools/run_blocks.py"
#: Examples of minutes, which `--whole` and `nox -s full` run.
SLOW = {"production_pipeline.py"}
SECONDS = 300
OFFLINE = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
#: The first line of a block that is run after those above it.
CONTINUES = "# continues the block above\n"

#: A fenced block, its language, its text. A block after `<!-- not run: reason -->` is left alone.
BLOCK = re.compile(r"(?P<skip><!-- not run: .+? -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?:\]\(|^\[\d+\]: )(?P<target>[^)\s]+)", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """A Python block of a page, and the program that it is: alone, or after those that it continues."""

    page: Path
    line: int
    program: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page as programs whose line numbers are the page's."""
    markdown, program = page.read_text(), [""]
    for block in BLOCK.finditer(markdown):
        if block["language"] == "python" and not block["skip"]:
            line = markdown.count("\n", 0, block.start("text")) + 1
            above = program if block["text"].startswith(CONTINUES) else []
            program = [*above, *[""] * (line - 1 - len(above)), *block["text"].splitlines()]
            yield Block(page, line, "\n".join(program))


#: Of all pages but decisions, which say what was true when they were made.
BLOCKS = [block for page in sorted(PAGES) for block in blocks_of(page)]
#: Starts run_blocks.py where the named libraries are loaded, or gives the one that was started before.
Runner = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    """Give what starts run_blocks.py; libraries use one thread there, because threads are not in a forked process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:

        @functools.cache
        def start(*libraries: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(RUNNER), *libraries]
            return stack.enter_context(subprocess.Popen(command, env=os.environ | OFFLINE | threads, **pipes))

        yield start


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_runs(block: Block, runner: Runner, tmp_path: Path) -> None:
    program, folder, output = tmp_path / name(block.page), tmp_path / "folder", tmp_path / "output"
    program.parent.mkdir(parents=True, exist_ok=True)  # its name is the page's, so that a traceback names file and line
    program.write_text(block.program)
    folder.mkdir()
    # transformers imports Triton, which must not be there before TRITON_INTERPRET is set.
    process = runner("torch", *([] if "TRITON_INTERPRET" in block.program else ["transformers.modeling_utils"]))
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([str(program), str(folder), str(output), SECONDS]), file=process.stdin, flush=True)
    code = int(process.stdout.readline())
    assert code == 0, f"{block} ends with exit code {code}:\n{output.read_text()}"


def run(program: Path, folder: Path) -> None:
    """Run a program in an empty folder, offline, within the time limit; show its output if it fails."""
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | OFFLINE, timeout=SECONDS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{program} failed:\n{done.stdout}{done.stderr}"


def kpt_lines(markdown: str) -> Iterator[list[str]]:
    """Yield the arguments of each `kpt` that a console block runs."""
    for block in BLOCK.finditer(markdown):
        for line in re.findall(r"^\$ (.+)", block["text"].replace("\\\n", " "), re.M):
            for command in re.split(r" && | \| | > ", line):
                words = shlex.split(command, comments=True)
                if words[:1] == ["kpt"]:
                    yield words[1:]


@pytest.mark.parametrize("page", sorted(PAGES), ids=name)
def test_console_lines_are_commands_of_kpt(page: Path) -> None:
    for words in kpt_lines(page.read_text()):
        command, rest = typer.main.get_command(app), words
        while isinstance(command, TyperGroup):
            assert rest, f"kpt {shlex.join(words)} names no command"
            assert rest[0] in command.commands, f"kpt {shlex.join(words)}: there is no {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_parser(typer.Context(command)).parse_args(rest)  # raises where an option is not there


@pytest.mark.parametrize(
    "example", [pytest.param(each, marks=[pytest.mark.slow] * (each.name in SLOW), id=name(each)) for each in EXAMPLES]
)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path)


def anchors(markdown: str) -> set[str]:
    """Return the anchors that a document's headings get when it is shown."""
    headings = re.findall(r"^#+ +(.+?) *$", BLOCK.sub("", markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_resolve(document: Path) -> None:
    broken = []
    for link in LINK.finditer(re.sub(r"`[^`\n]*`", "", BLOCK.sub("", document.read_text()))):
        path, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link["target"])
    assert not broken, f"{name(document)} links to what is not there: {broken}"


def test_tests_that_pages_name_exist() -> None:
    named = {test for document in DOCUMENTS for test in re.findall(r"`(test_[a-z0-9]+_\w+)`", document.read_text())}
    tests = "\n".join(file.read_text() for file in ROOT.glob("packages/*/tests/**/test_*.py"))
    assert named, "no page names a test"
    assert not [test for test in sorted(named) if f"def {test}(" not in tests]


def written(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a syntax tree, with … in the place of what is filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"\{[^}]*\}", "…", node.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from written(child)


def test_quoted_sentences_are_what_the_source_says() -> None:
    said = [text for file in ROOT.glob("packages/*/src/**/*.py") for text in written(ast.parse(file.read_text()))]
    quoted = re.findall(r"^\| `(.+?)` \|", SENTENCES.read_text(), re.M)
    assert len(quoted) > 20
    gone = [sentence for sentence in quoted if not any(sentence in text for text in said)]
    assert not gone, f"{name(SENTENCES)} quotes what no source says any more: {gone}"


def test_the_first_screen_shows_the_report() -> None:
    report = json.loads(plot_smollm.REPORT.read_text())
    assert plot_smollm.PLOT.read_text() == plot_smollm.draw(report)
    assert plot_smollm.PLACE.findall(plot_smollm.README.read_text()) == [plot_smollm.below(report)]
