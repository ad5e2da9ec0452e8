"""Builds wheels that run on every Linux with glibc 2.28 or later, for x86-64 and aarch64, whatever this machine has.

Run as ``-m tools.portable_wheel --zig DIRECTORY``: zig, which knows the symbols of every glibc, links for maturin. The
unwinder is the one of the system where the wheel runs (`zig.py` says why); a library with its names stands for it here.
Rust's standard library for another processor is installed by ``rustup``.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tools.vllm_env import ROOT, run

HERE = Path(__file__).parent
GLIBC = (2, 28)
PROCESSORS = ("x86_64", "aarch64")
UNWINDER = "libgcc_s.so.1"


def versions(text: str, name: str) -> list[tuple[int, ...]]:
    """Returns the versions of a library that `readelf --version-info` names, such as ``GLIBC_2.28``."""
    return sorted({tuple(map(int, found.split("."))) for found in re.findall(rf"\b{name}_([0-9]+(?:\.[0-9]+)*)", text)})


def check(library: Path) -> None:
    """Fails if a library needs a later glibc than the wheel's tag says, or has an unwinder of its own."""
    said = subprocess.run(["readelf", "-dVW", library], check=True, capture_output=True, text=True).stdout
    newest = max(versions(said, "GLIBC"), default=())
    if newest > GLIBC:
        raise SystemExit(f"{library.name} needs glibc {'.'.join(map(str, newest))}, more than {GLIBC[0]}.{GLIBC[1]}")
    if f"[{UNWINDER}]" not in said:
        raise SystemExit(f"{library.name} does not need {UNWINDER}: it was linked with another unwinder")


def check_wheel(wheel: Path) -> None:
    """Checks the libraries in a wheel."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        if not libraries:
            raise SystemExit(f"{wheel.name} has no library")
        for name in libraries:
            check(Path(archive.extract(name, directory)))


def build_unwinder(zig: Path, processor: str, out: Path, environ: Mapping[str, str]) -> None:
    """Builds a library with the names of the system's unwinder, to link with."""
    script = HERE / "unwinder.map"
    names = re.findall(r"\b_Unwind_\w+", script.read_text("utf-8"))
    source = out.with_name("unwinder.c")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), "utf-8")
    target = f"{processor}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{UNWINDER}", f"-Wl,--version-script={script}"]
    subprocess.run([zig, "cc", "-target", target, *options, "-o", out, source], check=True, env=environ)


def build(zig: Path, processor: str, out: Path) -> Path:
    """Builds and checks the wheel for one kind of processor."""
    target = f"{processor}-unknown-linux-gnu"
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        unwinder, wheels = made / UNWINDER, made / "wheels"
        environ = {
            **os.environ,
            "CARGO_ZIGBUILD_ZIG_PATH": str(HERE / "zig.py"),
            "KVDEPOT_ZIG": str(zig),
            "KVDEPOT_UNWINDER": str(unwinder),
        }
        build_unwinder(zig, processor, unwinder, environ)
        libraries = subprocess.check_output(["rustc", "--print", "target-libdir", "--target", target], text=True)
        if not Path(libraries.strip()).is_dir():
            if shutil.which("rustup") is None:
                raise SystemExit(f"Rust's standard library for {target} is missing, and so is rustup to install it")
            run("rustup", "target", "add", target)
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"
        maturin = str(ROOT / ".venv" / "bin" / "maturin")
        command = [maturin, "build", "--release", "--locked", "--zig", "--target", target]
        command += ["--compatibility", tag, "--out", str(wheels)]
        subprocess.run(command, check=True, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
        (wheel,) = wheels.glob("*.whl")
        check_wheel(wheel)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def main() -> None:
    """Builds the wheels that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zig", type=Path, required=True, help="directory into which ziglang was installed")
    parser.add_argument("--processor", choices=PROCESSORS, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "portable", help="where the wheels go")
    chosen = parser.parse_args()
    zig = (chosen.zig / "ziglang" / "zig").absolute()
    for processor in chosen.processor or PROCESSORS:
        print(f"building the wheel for {processor}; it takes minutes", flush=True)
        print(build(zig, processor, chosen.out.absolute()), flush=True)


if __name__ == "__main__":
    main()
