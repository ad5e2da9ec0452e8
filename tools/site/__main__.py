"""Builds the documentation as a site: ``python -m tools.site [--out DIR]``; ``make site`` does it.

The pages are the repository's own Markdown files, at their own places, so that their links stay valid. The references
of the command line and of the Python API are generated from the program. A warning of Sphinx fails the build.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples")
MENU: dict[str, tuple[str, ...]] = {
    "Use": (
        "docs/tutorial",
        "docs/vllm",
        "docs/lmcache",
        "docs/sglang",
        "docs/offloading",
        "docs/ucm",
        "docs/library",
        "docs/layouts",
        "docs/traces",
        "docs/fleet",
        "examples/README",
    ),
    "Operate": ("docs/deploy", "docs/mooncake", "docs/operate", "docs/monitoring", "docs/events", "docs/benchmarks"),
    "Reference": ("docs/configuration", "reference/commands", "reference/python", "docs/format", "docs/wire"),
    "Project": ("docs/design", "CONTRIBUTING", "SECURITY", "CHANGELOG"),
}
COMMANDS = """# Commands

Made from `kvdepot --help`. [Operation](../docs/operate.md) says when to use which.

```{eval-rst}
.. click:: kvdepot.cli:main
   :prog: kvdepot
   :nested: full
```
"""
PYTHON = """# Python API

Made from the docstrings. [README](../README.md#python) and [library.md](../docs/library.md) have examples.

```{eval-rst}
.. automodule:: kvdepot
   :no-members:

.. autofunction:: kvdepot.open
.. autofunction:: kvdepot.attach
.. autoclass:: kvdepot.Depot
   :members:
.. autoclass:: kvdepot.Group
   :members:
.. autoclass:: kvdepot.Claim
   :members:
.. autoclass:: kvdepot.Hit
.. autoclass:: kvdepot.Arriving
.. autoclass:: kvdepot.ClaimTimes
.. autoclass:: kvdepot.TierReads
.. autoclass:: kvdepot.Namespace
   :members:
.. autoclass:: kvdepot.Store
   :members:
.. autoclass:: kvdepot.Task
   :members:
.. autoclass:: kvdepot.TaskResult
   :members:
.. autoclass:: kvdepot.BlockLayout
   :members:
.. autoclass:: kvdepot.Follower
   :members:
.. autoclass:: kvdepot.Change
.. autofunction:: kvdepot.block_hash
.. autofunction:: kvdepot.load_config
.. autofunction:: kvdepot.load_engine_config
.. autoclass:: kvdepot.KVDepotConfig
.. autofunction:: kvdepot.tell_if_absent
.. autofunction:: kvdepot.is_failure
.. automodule:: kvdepot.errors
   :members:
   :exclude-members: is_failure
```
"""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def pages() -> list[Path]:
    """Returns all pages of the repository that are part of the site, relative to its root."""
    found = []
    for name in PAGES:
        path = ROOT / name
        found += sorted(path.glob("*.md")) if path.is_dir() else [path]
    return [path.relative_to(ROOT) for path in found]


def unlisted() -> set[str]:
    """Returns pages that are in no menu, and names in menus that have no page."""
    made = {"reference/commands", "reference/python"}
    listed = {page for group in MENU.values() for page in group}
    there = {str(path.with_suffix("")) for path in pages()} - {"README"}
    return listed.symmetric_difference(there | made)


def targets(page: Path) -> list[Path]:
    """Returns files and directories that a page links to, relative to the root, including missing ones."""
    found = []
    for _, target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            found.append(Path(os.path.normpath(page.parent / unquote(target))))
    return found


def broken_links() -> list[str]:
    """Returns links of the pages to files that are not in the repository."""
    return [f"{page}: {target}" for page in pages() for target in targets(page) if not (ROOT / target).exists()]


def without_directories(page: Path) -> str:
    """Returns a page's text with links to directories as plain text: a site has no page for them."""

    def replaced(link: re.Match[str]) -> str:
        return link[1] if (ROOT / page.parent / unquote(link[2])).is_dir() else link[0]

    return LINK.sub(replaced, (ROOT / page).read_text(encoding="utf-8"))


def menus() -> str:
    """Returns the menu of all pages, for the end of the README."""
    groups = []
    for caption, names in MENU.items():
        lines = "\n".join(names)
        groups.append(f"```{{toctree}}\n:caption: {caption}\n:hidden:\n:maxdepth: 1\n\n{lines}\n```\n")
    return "\n".join(groups)


def assemble(source: Path) -> None:
    """Copies all pages into an empty directory and adds those that are generated from the program."""
    shutil.rmtree(source, ignore_errors=True)
    for page in pages():
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(without_directories(page), encoding="utf-8")
        for target in targets(page):
            if (ROOT / target).is_file() and target.suffix != ".md":
                (source / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / target, source / target)
    with (source / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("\n" + menus())
    (source / "reference").mkdir()
    (source / "reference" / "commands.md").write_text(COMMANDS, encoding="utf-8")
    (source / "reference" / "python.md").write_text(PYTHON, encoding="utf-8")


def main() -> int:
    """Builds the site. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds the documentation as a site.")
    parser.add_argument("--out", type=Path, default=ROOT / ".work" / "site", help="directory of the site")
    arguments = parser.parse_args()
    for what in [*(f"not in a menu, or without a page: {name}" for name in sorted(unlisted())), *broken_links()]:
        print(f"error: {what}", file=sys.stderr)
        return 1
    source = ROOT / ".work" / "site-pages"
    assemble(source)
    settings = str(Path(__file__).parent)
    status = sphinx(["-q", "-W", "--keep-going", "-E", "-c", settings, "-b", "html", str(source), str(arguments.out)])
    if status == 0:
        shutil.copyfile(arguments.out / "README.html", arguments.out / "index.html")
        print(arguments.out / "index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
