"""Checks of the machine, of a configuration's directories, and of installed versions: what ``kvdepot doctor`` shows."""
