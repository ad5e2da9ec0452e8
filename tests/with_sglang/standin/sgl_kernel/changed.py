"""Changes a module of SGLang's right after its import."""

import importlib.abc
import importlib.machinery
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module, change):
        self._module = module
        self._change = change

    def find_spec(self, name, path, target=None):
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(module, change):
    """Calls ``change`` with a module once it is imported."""
    sys.meta_path.insert(0, _Finder(module, change))
