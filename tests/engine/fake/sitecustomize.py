"""Replaces ``kvdepot._native`` by the fake core, in every Python process that has this directory in its path."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class FakeNative(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "kvdepot._native":
            return None
        return importlib.util.spec_from_file_location(fullname, Path(__file__).parent.parent / "fake_native.py")


sys.meta_path.insert(0, FakeNative())
