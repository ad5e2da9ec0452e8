"""Checks of the machine, a configuration's directories and media, and installed versions, for ``kvdepot doctor``."""
