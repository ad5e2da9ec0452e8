"""The wheel installs on every system with glibc 2.28 or later, whatever system it was built on."""

import platform
import re
from importlib.metadata import distribution
from pathlib import Path

from kvdepot import _native

GLIBC = (2, 28)


def test_the_wheel_is_tagged_for_an_old_glibc_and_for_every_python() -> None:
    text = distribution("kvdepot").read_text("WHEEL")
    assert text is not None
    tags = re.findall(r"^Tag: (.*)$", text, re.MULTILINE)
    assert tags == [f"cp310-abi3-manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"]


def test_the_native_module_needs_no_newer_glibc_than_its_tag_says() -> None:
    module = Path(_native.__file__).read_bytes()
    versions = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", module)}
    assert versions
    assert max(versions) <= GLIBC
