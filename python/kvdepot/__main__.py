"""``python -m kvdepot``: the same as the command ``kvdepot``."""

from kvdepot.cli import main

if __name__ == "__main__":
    main()
