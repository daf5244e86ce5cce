"""Hold the documents to what they promise: code runs, links lead somewhere, quoted sentences are in the source."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import plot_minilm
import pytest
from public_names import PAGES

ROOT = Path(__file__).parents[1]
HIDDEN = {".git", ".nox", ".venv", ".cache"}
#: Whose code runs: all but decisions, which say what was true when they were made.
READMES = sorted(path for path in PAGES if "```python" in path.read_text())
SENTENCES = ROOT / "docs/troubleshooting.md"
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not HIDDEN & set(path.relative_to(ROOT).parts))
SECONDS = 180

#: A fenced block, its language, its text. A block after `<!-- not run: reason -->` is left alone.
BLOCK = re.compile(r"(?P<skip><!-- not run: .+? -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?:\]\(|^\[\d+\]: )(?P<target>[^)\s]+)", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_of(markdown: str) -> str:
    """Return the Python blocks of a document as one program whose line numbers are the document's."""
    program = [""] * (markdown.count("\n") + 1)
    for block in BLOCK.finditer(markdown):
        if block["language"] == "python" and not block["skip"]:
            first = markdown.count("\n", 0, block.start("text"))
            lines = block["text"].splitlines()
            program[first : first + len(lines)] = lines
    return "\n".join(program)


def run(program: Path, folder: Path) -> None:
    """Run a program in an empty folder, offline, within the time limit; show its output if it fails."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=folder, env=env, timeout=SECONDS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program} failed:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_readme_code_runs(readme: Path, tmp_path: Path) -> None:
    program = tmp_path / "README.md"  # so that a traceback names the file and the line
    program.write_text(python_of(readme.read_text()))
    run(program, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
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


def test_the_plot_shows_the_report() -> None:
    assert plot_minilm.PLOT.read_text() == plot_minilm.draw(json.loads(plot_minilm.REPORT.read_text()))
