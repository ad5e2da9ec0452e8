"""Checks of the machine, of a configuration's directories, and of installed versions, for ``kvdepot doctor``."""
