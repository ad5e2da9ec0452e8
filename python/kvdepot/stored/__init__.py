"""The content of a ``Posix`` tier's directories, read without a depot. ``docs/format.md`` describes every byte."""
