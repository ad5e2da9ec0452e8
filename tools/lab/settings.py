"""``--set KEY=VALUE`` of a command line: keys of kvdepot's configuration, spelled as in its file."""

import argparse
from typing import Any

import yaml


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option; the depot itself rejects a wrong key or value."""
    text = "a key of kvdepot's configuration; may be given several times"
    parser.add_argument("--set", dest="settings", action="append", type=_setting, default=[], metavar="K=V", help=text)


def _setting(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, yaml.safe_load(value)
