"""The content of a ``Posix`` tier's directories, and of media of the ``Slab`` and ``Dax`` tiers, read without a depot.

``docs/format.md`` describes every byte.
"""
