"""Hooks of mkdocs: pages that lie outside docs/, links to them, and an API reference made from each `__all__`.

`README.md` is the home page. A package's README and CHANGELOG become pages under `packages/`. What else a page links to
(reports, sources) is served as the file that it is.
"""

import ast
import logging
import os
import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from public_names import ROOT, page_showing, public_names

LINK = re.compile(r"(?P<before>\]\(|^\[\d+\]: |src=\")(?P<target>[^)\s#\"]+)(?P<anchor>#[^)\s\"]*)?", re.M)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
log = logging.getLogger("mkdocs.hooks.kpt")


def place_of(path: str) -> str:
    """Return where a file of the repository lies in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith((".md", ".svg", ".json", ".png")):
        return path
    return f"{path.removeprefix('.')}.txt"  # a browser shows it; mkdocs leaves out names with a dot before them


def bound(module: str, package: Path) -> set[str]:
    """Return the names that a module's source binds; others come by its `__getattr__`, and are shown where they are."""
    init = (package / "src").joinpath(*module.split("."), "__init__.py")
    found = set()
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target) for target in targets}
    return found


def reference(package: Path) -> str:
    """Return the page of a package's public names; empty if it has none."""
    lines = []
    for module, names in public_names(package).items():
        here = bound(module, package)
        folder = (package / "src").joinpath(*module.split("."))
        lines += [f"## `{module}`", ""]
        for name in (name for name in names if name in here):
            # What is named like the module that it is in must be told apart from that.
            inside = f"{name}.{name}" if (folder / f"{name}.py").exists() else name
            lines.append(f"::: {module}.{inside}\n")
            if page := page_showing(name):
                path = page.relative_to(ROOT).as_posix()
                lines.append(f"In code: [{path}]({relpath(place_of(path), 'reference')})\n")
        if elsewhere := [f"`{name}`" for name in names if name not in here]:
            lines += [f"{', '.join(elsewhere)} are those of [kpt-optimize](kpt-optimize.md).", ""]
    return "\n".join([f"# {package.name}", "", *lines]) if lines else ""


def linked(text: str, source: str, there: set[str]) -> tuple[str, set[str]]:
    """Rewrite the links of a page that is made from `source`; return it, and the files that it links to."""
    wanted: set[str] = set()
    folder = os.path.dirname(source)
    here = os.path.dirname(place_of(source))

    def rewrite(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        path = normpath(os.path.join(folder, target))
        if re.match(r"[a-z]+:", target) or not (ROOT / path).exists():
            return link[0]
        if (ROOT / path).is_dir():
            path = f"{path}/README.md" if (ROOT / path / "README.md").exists() else ""
        if not path:
            return f"{link['before']}{relpath('index.md', here or '.')}"
        wanted.add(path)
        return f"{link['before']}{relpath(place_of(path), here or '.')}{anchor}"

    parts, end = [], 0
    for code in CODE.finditer(text):  # code stays as it is
        parts += [LINK.sub(rewrite, text[end : code.start()]), code[0]]
        end = code.end()
    parts.append(LINK.sub(rewrite, text[end:]))
    return "".join(parts), wanted - there


def on_config(config: Any) -> Any:
    """Put the packages and the API reference into the navigation."""
    config.nav.append({"Packages": [{each.name: f"packages/{each.name}/README.md"} for each in PACKAGES]})
    pages = [{each.name: f"reference/{each.name}.md"} for each in PACKAGES if public_names(each)]
    config.nav.append({"API reference": pages})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep tables of registers and old decisions out of the search, where they crowd out what readers look for."""
    if page.file.src_uri == "kernels.md" or page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
    return markdown


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and what they link to."""
    sources = ["README.md", "CONTRIBUTING.md"]
    for package in PACKAGES:
        sources += [f"packages/{package.name}/README.md", f"packages/{package.name}/CHANGELOG.md"]
        if page := reference(package):
            files.append(File.generated(config, f"reference/{package.name}.md", content=page))
    done: set[str] = set()
    waiting = [*sources, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None)]
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        content: str | bytes
        if source.endswith(".md"):
            content, wanted = linked((ROOT / source).read_text(encoding="utf-8"), source, done)
            waiting += sorted(wanted)
        else:
            content = (ROOT / source).read_bytes()
        if (old := files.get_file_from_path(place_of(source))) is not None:
            files.remove(old)
        files.append(File.generated(config, place_of(source), content=content))
    log.info("%d files of the repository", len(done))
    return files
