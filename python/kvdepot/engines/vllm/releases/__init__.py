"""Differences between the releases of vLLM: one file each, which chooses by what is there and not by a version.

``refusal`` says what every release must have. A hook that only later releases call needs no file: the connector
implements it, and earlier releases never call it.
"""
