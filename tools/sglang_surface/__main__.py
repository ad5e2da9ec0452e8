"""Writes the tables: ``python -m tools.sglang_surface --download FOLDER``, or with wheels that are there already."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from tools.sglang_surface.table import ROOT, table_of_sglang
from tools.vllm_surface.sources import Release

TABLES = ROOT / "tests" / "python" / "engines" / "sglang_surface"
RELEASES = (
    *("0.5.8.post1", "0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1"),
    *("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
"""The last one of each number."""


def download(folder: Path) -> list[Path]:
    """Downloads the releases' wheels that ``folder`` lacks, about 110 MB, and returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for release in RELEASES:
        if not list(folder.glob(f"sglang-{release}-*.whl")):
            options = ["--platform", "manylinux_2_34_x86_64", "--no-deps", "--only-binary", ":all:"]
            options += ["--python-version", "3.11", "--dest", str(folder)]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, f"sglang=={release}"], check=True)
        found += folder.glob(f"sglang-{release}-*.whl")
    return found


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="*", metavar="WHEEL", help="wheel, or folder of its sources")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="download every release's wheel into FOLDER")
    parser.add_argument("--out", type=Path, default=TABLES, help="folder for the tables (default: %(default)s)")
    arguments = parser.parse_args()
    wheels = [*arguments.wheels, *(download(arguments.download) if arguments.download else ())]
    if not wheels:
        parser.error("name wheels of SGLang, or use --download")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        version = re.search(r"(\d+\.\d+\.\d+)(\.post\d+)?", wheel.name)
        if version is None:
            parser.error(f"{wheel}: the name has no release in it, such as 0.5.23")
        table = table_of_sglang(Release(wheel, "sglang"), version.group())
        path = arguments.out / f"{version.group(1)}.json"
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(table['definitions'])} definitions")


if __name__ == "__main__":
    main()
