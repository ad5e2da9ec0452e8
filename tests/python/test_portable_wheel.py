"""What `make portable-wheels` adds to maturin: the unwinder, and the checks of the wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvdepot._native
from tools.portable_wheel.__main__ import GLIBC, HERE, UNWINDER, check, check_wheel, versions

LONG_S = 60


def compiled(directory: Path, *options: str) -> Path:
    """Returns a library that calls the unwinder."""
    source, library = directory / "call.c", directory / "call.so"
    source.write_text("void _Unwind_Resume(void *);\nvoid call(void *at) { _Unwind_Resume(at); }\n")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-nostdlib", "-o", library, source, *options], check=True, timeout=LONG_S
    )
    return library


@pytest.mark.parametrize("in_file", [False, True])
def test_zig_links_the_system_s_unwinder(tmp_path: Path, in_file: bool) -> None:
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\nfor one in "$@"; do case $one in @*) cat "${one#@}";; *) echo "$one";; esac; done\n')
    zig.chmod(0o700)
    arguments = ["cc", "-lunwind", "-lc"]
    if in_file:
        (tmp_path / "arguments").write_text('"-lunwind"\n-lc\n')
        arguments = ["cc", f"@{tmp_path}/arguments"]
    environ = {**os.environ, "KVDEPOT_ZIG": str(zig), "KVDEPOT_UNWINDER": "/made/libgcc_s.so.1"}
    command = [sys.executable, HERE / "zig.py", *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environ, timeout=LONG_S).stdout
    assert said.split() == ["cc", "/made/libgcc_s.so.1", "-lc"]


def test_a_library_with_another_unwinder_is_refused(tmp_path: Path) -> None:
    check(compiled(tmp_path, "-lgcc_s"))
    with pytest.raises(SystemExit, match="another unwinder"):
        check(compiled(tmp_path, "-Wl,--allow-shlib-undefined"))


def test_a_library_that_needs_a_later_glibc_is_refused(tmp_path: Path) -> None:
    native = Path(kvdepot._native.__file__)
    said = subprocess.run(["readelf", "-VW", native], check=True, capture_output=True, text=True).stdout
    newest = max(versions(said, "GLIBC"))
    wheel = tmp_path / "kvdepot.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(native, "kvdepot/_native.abi3.so")
    if newest > GLIBC:
        with pytest.raises(SystemExit, match=f"needs glibc {newest[0]}.{newest[1]}"):
            check_wheel(wheel)
    else:
        check_wheel(wheel)


def test_versions_are_compared_as_numbers() -> None:
    assert versions("GLIBC_2.4 GLIBC_2.28 GLIBC_2.28. GCC_3.0", "GLIBC") == [(2, 4), (2, 28)]


def test_a_wheel_without_a_library_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvdepot/__init__.py", "")
    with pytest.raises(SystemExit, match="no library"):
        check_wheel(wheel)


def test_the_stand_in_for_the_unwinder_has_all_that_rust_calls() -> None:
    native = Path(kvdepot._native.__file__)
    said = subprocess.run(["readelf", "-sW", "--dyn-syms", native], check=True, capture_output=True, text=True).stdout
    wanted = {word.split("@")[0] for word in said.split() if word.startswith("_Unwind_")}
    assert wanted
    assert wanted <= set((HERE / "unwinder.map").read_text("utf-8").replace(";", " ").split())
    assert UNWINDER == "libgcc_s.so.1"
