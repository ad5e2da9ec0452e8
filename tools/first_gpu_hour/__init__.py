"""The first hour on a GPU: what reading and stand-ins could not tell, as one command with one report."""
