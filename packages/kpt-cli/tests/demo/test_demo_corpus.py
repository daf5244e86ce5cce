from pathlib import Path

import pytest

from kpt_cli.demo.corpus import END_OF_FILE, encode, is_held_out, read_corpus, train_tokenizer
from kpt_cli.errors import CliError

MODULE = "def f(x):\n    return x + 1\n" * 200


def library(root: Path, paths: list[str]) -> Path:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MODULE)
    return root


def test_corpus_is_the_same_every_time_and_no_file_is_in_both_parts():
    corpus = read_corpus()
    assert corpus == read_corpus()
    training, held_out = ({source.path for source in part} for part in (corpus.training, corpus.held_out))
    assert training
    assert held_out
    assert not training & held_out
    assert len(held_out) < len(training) / 5
    assert [source.path for source in corpus.training] == sorted(training)


def test_the_path_alone_decides_what_is_held_out(tmp_path):
    paths = [f"module_{number}.py" for number in range(60)]
    first = read_corpus(library(tmp_path / "a", paths))
    second = read_corpus(library(tmp_path / "b", [*paths, "another.py", "zoo.py"]))
    assert {source.path for source in first.held_out} <= {source.path for source in second.held_out}
    assert all(is_held_out(source.path) for source in first.held_out)


def test_bulk_links_and_empty_files_are_left_out(tmp_path):
    paths = [f"module_{number}.py" for number in range(60)]
    bulk = ["test/test_a.py", "site-packages/a.py", "json/tests/test_b.py", "idlelib/c.py", "_sysconfigdata_x.py"]
    root = library(tmp_path, [*paths, *bulk])
    (root / "empty.py").write_text("\n")
    (root / "link.py").symlink_to(root / "module_0.py")
    corpus = read_corpus(root)
    assert {source.path for source in (*corpus.training, *corpus.held_out)} == set(paths)


@pytest.mark.parametrize("paths", [[], ["one.py"]])
def test_a_library_without_sources_is_refused(tmp_path, paths):
    with pytest.raises(CliError, match="bytes of Python source code; expected the standard library"):
        read_corpus(library(tmp_path / "lib", paths))


def test_tokenizer_is_the_same_every_time_and_loses_nothing():
    corpus = read_corpus(limit=150_000)
    one, other = (train_tokenizer(corpus.training, 400, 64) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()
    assert len(one) == 400
    text = "def naïve(π):\n\treturn '☃'  # \x00\n"
    assert one.decode(one(text)["input_ids"]) == text
    tokens = encode(one, corpus.training)
    end = one.convert_tokens_to_ids(END_OF_FILE)
    assert int((tokens == end).sum()) == len(corpus.training)
    assert tokens[-1] == end
