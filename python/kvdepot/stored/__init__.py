"""What the directories of a ``Posix`` tier hold, read without a depot. ``docs/format.md`` describes every byte."""
