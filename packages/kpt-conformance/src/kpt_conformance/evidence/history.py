"""The git history that a kernel's files are of: which commit has them, and whether a record's commit had."""

import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from kpt_core.evidence import Sources
from kpt_core.evidence.sources import digest_of

#: A line for each commit that is gone: its name, then why. Beside the ratchet, in the topmost folder of a work tree.
REWRITTEN = "evidence/rewritten-commits.txt"
_DIGESTS = re.compile(rb"(\S+ [0-9a-f]{64}\n)+")


class History:
    """The commits of a work tree.

    Args:
        root: its topmost folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, dict[str, str]] = {}
        self._digests: dict[str, str] = {}

    @property
    def shallow(self) -> bool:
        """Whether commits are missing, because the clone was made without them."""
        return self._text("rev-parse", "--is-shallow-repository") == "true"

    @property
    def head(self) -> str | None:
        """The commit that is checked out; None before the first."""
        return self._text("rev-parse", "--short=12", "HEAD")

    def date(self, commit: str) -> datetime | None:
        """When a commit was made; None if there is no such commit here."""
        seconds = self._text("show", "-s", "--format=%ct", f"{commit}^{{commit}}")
        return datetime.fromtimestamp(int(seconds), UTC) if seconds else None

    def before_head(self, commit: str) -> bool:
        """Whether a commit is one of those that led to the present one."""
        return self._text("merge-base", "--is-ancestor", commit, "HEAD") is not None

    def rewritten(self, commit: str) -> bool:
        """Whether a commit is told to be gone: it was squashed, or landed again under another name."""
        file = self.root / REWRITTEN
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return commit in (line.split()[0] for line in lines if line.strip() and not line.startswith("#"))

    def newest_until(self, date: datetime) -> str | None:
        """The newest commit up to a time."""
        return self._text("rev-list", "-1", "--abbrev-commit", "--abbrev=12", f"--before={date.isoformat()}", "HEAD")

    def changed(self, commit: str, sources: Sources) -> list[str]:
        """The files of a kernel that are others than at a commit.

        A file that git does not track has to be a list of digests, which a build left, of files that it does track:
        native code is compared by that.
        """
        tree = self._tree(commit)
        found = []
        for name, file in sorted(sources.files.items()):
            content = file.read_bytes()
            path = file.resolve()
            inside = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else ""
            if inside in tree:
                if self._digest(tree[inside]) != digest_of(content):
                    found.append(name)
            elif _DIGESTS.fullmatch(content.replace(b"\r\n", b"\n")):
                found += self._unlike(tree, content.decode().splitlines())
            else:
                found.append(name)
        return found

    def versions(self, file: Path) -> list[str]:
        """What a file held after each commit that changed it, the newest first."""
        inside = file.resolve().relative_to(self.root).as_posix()
        commits = (self._text("log", "--format=%H", "--", inside) or "").split()
        held = (self._run("show", f"{commit}:{inside}") for commit in commits)
        return [content.decode(errors="replace") for content in held if content is not None]

    def _unlike(self, tree: dict[str, str], lines: Iterable[str]) -> list[str]:
        by_name: dict[str, list[str]] = {}
        for path, blob in tree.items():
            by_name.setdefault(path.rpartition("/")[2], []).append(blob)
        digests = (line.split() for line in lines)
        return [name for name, digest in digests if digest not in map(self._digest, by_name.get(name, ()))]

    def _tree(self, commit: str) -> dict[str, str]:
        """The files of a commit, each with the name of its content."""
        if commit not in self._trees:
            listed = self._run("ls-tree", "-r", "-z", "--full-tree", commit) or b""
            entries = (entry.split("\t", 1) for entry in listed.decode(errors="replace").split("\0") if entry)
            self._trees[commit] = {path: about.split()[2] for about, path in entries}
        return self._trees[commit]

    def _digest(self, blob: str) -> str:
        if blob not in self._digests:
            self._digests[blob] = digest_of(self._run("cat-file", "blob", blob) or b"")
        return self._digests[blob]

    def _text(self, *arguments: str) -> str | None:
        told = self._run(*arguments)
        return None if told is None else told.decode(errors="replace").strip()

    def _run(self, *arguments: str) -> bytes | None:
        return _git(self.root, *arguments)


_known: dict[Path, History] = {}


def history_of(folder: Path) -> History | None:
    """The history of the work tree that a folder lies in; None if it lies in none, git ignores it or is not there."""
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None or _git(folder, "check-ignore", ".") is not None:
        return None
    place = Path(root.decode().strip()).resolve()
    found = _known.setdefault(place, History(place))
    return found if found.head else None


def history_of_sources(sources: Sources) -> History | None:
    """The history that the Python files of a kernel are of."""
    folders = {file.resolve().parent for file in sources.files.values() if file.suffix == ".py"}
    return history_of(min(folders))


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints, None if it says no."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
