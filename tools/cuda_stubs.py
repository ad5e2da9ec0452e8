"""Makes a CUDA build of torch importable without CUDA, by stubs for the libraries that its own libraries link to.

Run as ``cuda_stubs.py SITE_PACKAGES``. The stubs lie beside torch's libraries, in that environment only. Every stub
function returns "no device", so that torch finds no GPU; functions that run while libraries are loaded return success.
Needs gcc and the ``nm`` and ``readelf`` that come with it.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100
RUNS_AT_LOAD = re.compile(r"__cuda")
# Prefixes of a library's functions, for symbols whose version does not name their library.
PREFIXES = {
    "libcublas": ("cublas",),
    "libcublasLt": ("cublasLt",),
    "libcudart": ("cuda", "__cuda"),
    "libcudnn": ("cudnn",),
    "libcufft": ("cufft",),
    "libcufile": ("cuFile",),
    "libcupti": ("cupti",),
    "libcurand": ("curand",),
    "libcusolver": ("cusolver",),
    "libcusparse": ("cusparse",),
    "libcusparseLt": ("cusparseLt",),
    "libnccl": ("nccl", "pnccl"),
    "libnvrtc": ("nvrtc",),
    "libnvshmem_host": ("nvshmem",),
}
OWNER = {prefix: stem for stem, prefixes in PREFIXES.items() for prefix in prefixes}


def output_of(*command: str) -> str:
    """Returns the standard output of a program that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def linked_names(library: Path) -> set[str]:
    """Returns the names of the libraries that ``library`` is linked to."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", str(library))))


def owner_of(symbol: str) -> str | None:
    """Returns the stem of a symbol's library, by its longest known prefix."""
    matches = [prefix for prefix in OWNER if symbol.startswith(prefix)]
    return OWNER[max(matches, key=len)] if matches else None


def missing_symbols(library: Path) -> set[tuple[str, str, str]]:
    """Returns ``(stem of its library, symbol, version or "")`` of every CUDA function that ``library`` needs."""
    found = set()
    for line in output_of("nm", "-D", "--undefined-only", str(library)).splitlines():
        symbol, _, version = line.split()[-1].partition("@")
        stem = owner_of(symbol)
        if stem:
            found.add((stem, symbol, version.lstrip("@")))
    return found


def build_stub(target: Path, symbols: set[tuple[str, str]]) -> None:
    """Compiles a library that defines ``symbols``, each with its version."""
    source = "".join(
        f"int {name}(void) {{ return {0 if RUNS_AT_LOAD.match(name) else NO_DEVICE}; }}\n"
        for name, _ in sorted(symbols)
    )
    by_version: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(symbols):
        if version:
            by_version[version].append(name)
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        code.write_text(source)
        versions.write_text("".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in by_version.items()))
        script = [f"-Wl,--version-script={versions}"] if by_version else []
        command = ["gcc", "-w", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{target.name}", *script]
        subprocess.run([*command, "-o", str(target), str(code)], check=True)


def main(site_packages: Path) -> int:
    """Builds every missing stub. Returns their number."""
    directory = site_packages / "torch" / "lib"
    libraries = [
        path
        for path in directory.glob("lib*.so")
        if path.stem in {"libshm"} or "torch" in path.name or "c10" in path.name
    ]
    names = set().union(*map(linked_names, libraries))
    wanted: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for library in libraries:
        for stem, symbol, version in missing_symbols(library):
            wanted[stem].add((symbol, version))
    count = 0
    for name in sorted(names):
        stem = name.partition(".so")[0]
        if stem in PREFIXES and not (directory / name).exists():
            build_stub(directory / name, wanted[stem])
            count += 1
    return count


if __name__ == "__main__":
    print(f"{main(Path(sys.argv[1]))} stub libraries")
