"""The first hour on a GPU: measures what reading and stand-ins could not show, as one command with one report."""
