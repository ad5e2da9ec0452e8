#!/usr/bin/env python3
"""Makes kvcopy_80.ptx from kvcopy.cu, or checks that one belongs to the other. Needs no device and no toolkit.

usage: make_ptx.py          write the PTX, by NVRTC
       make_ptx.py --check  compare the sums that stand in the PTX; where NVRTC is, compile and compare that as well

NVRTC is that of CUDA 12.0, whatever is newer on the machine: it writes PTX ISA 8.0, which every driver for CUDA 12 or
later can load. Get it by: pip install nvidia-cuda-nvrtc-cu12==12.0.140
"""

import ctypes
import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "kvcopy.cu"
PTX = HERE / "kvcopy_80.ptx"
OPTIONS = (b"--gpu-architecture=compute_80", b"--std=c++17")
NVRTC_VERSION = (12, 0)
ISA = ".version 8.0"
RULE = "// ----"


def find_nvrtc() -> Path | None:
    """The library of the package that the usage names."""
    spec = find_spec("nvidia.cuda_nvrtc") if find_spec("nvidia") else None
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("lib/libnvrtc.so.12")]
    return found[0] if found else None


def compile_source(library: Path) -> str:
    nvrtc = ctypes.CDLL(str(library))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(code: int) -> None:
        if code:
            raise SystemExit(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")

    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    if (major.value, minor.value) != NVRTC_VERSION:
        raise SystemExit(f"NVRTC is {major.value}.{minor.value}, not {NVRTC_VERSION[0]}.{NVRTC_VERSION[1]}: see --help")
    program = ctypes.c_void_p()
    name, text = SOURCE.name.encode(), SOURCE.read_bytes()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    code = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    check(code)
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx))
    body = ptx.value.decode()
    if ISA not in body.splitlines():
        raise SystemExit(f"NVRTC did not write {ISA}")
    return body.strip() + "\n"


def with_header(body: str) -> str:
    sums = (
        f"// source sha256 {hashlib.sha256(SOURCE.read_bytes()).hexdigest()}",
        f"// body sha256 {hashlib.sha256(body.encode()).hexdigest()}",
    )
    command = f"// Made from {SOURCE.name} by {Path(__file__).name} with {b' '.join(OPTIONS).decode()}; do not edit."
    return "\n".join((command, *sums, RULE, body))


def main() -> None:
    arguments = sys.argv[1:]
    if arguments not in ([], ["--check"]):
        raise SystemExit(__doc__)
    library = find_nvrtc()
    if not arguments:
        if library is None:
            raise SystemExit("NVRTC is not there: pip install nvidia-cuda-nvrtc-cu12==12.0.140")
        PTX.write_text(with_header(compile_source(library)))
        print(f"wrote {PTX.name}")
        return
    kept = PTX.read_text()
    _, _, body = kept.partition(RULE + "\n")
    if kept != with_header(body):
        raise SystemExit(f"{PTX.name} does not belong to {SOURCE.name}: run {Path(__file__).name}")
    if library is not None and compile_source(library) != body:
        raise SystemExit(f"NVRTC makes another {PTX.name} of {SOURCE.name}: run {Path(__file__).name}")
    print("PTX and source agree" + ("" if library else " (by their sums; NVRTC is not there to compile them)"))


if __name__ == "__main__":
    main()
