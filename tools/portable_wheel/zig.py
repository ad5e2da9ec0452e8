#!/usr/bin/env python3
"""Runs zig for maturin, and has it link the system's unwinder in place of its own.

KVDEPOT_ZIG is zig, KVDEPOT_UNWINDER the library to link. Python ends a daemon thread that waits in kvdepot by
``pthread_exit``, which unwinds its stack with libgcc_s. Zig's unwinder would stand in the way and abort the process.
"""

import os
import sys
from pathlib import Path

ZIGS_OWN = "-lunwind"


def main() -> None:
    """Replaces this process by zig."""
    zig, unwinder = os.environ["KVDEPOT_ZIG"], os.environ["KVDEPOT_UNWINDER"]
    arguments = [unwinder if argument == ZIGS_OWN else argument for argument in sys.argv[1:]]
    for argument in arguments:
        # Long command lines come in a file.
        if argument.startswith("@"):
            file = Path(argument[1:])
            lines = file.read_text("utf-8").splitlines()
            file.write_text("\n".join(unwinder if line.strip('"') == ZIGS_OWN else line for line in lines), "utf-8")
    os.execv(zig, [zig, *arguments])


if __name__ == "__main__":
    main()
