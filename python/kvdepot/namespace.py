"""Namespaces: what a block's bytes depend on besides its hash."""

import json
from collections.abc import Callable, Mapping

from kvdepot import _native
from kvdepot.errors import ConfigError
from kvdepot.layout import BlockLayout


class Namespace:
    """A namespace that is open in this process. Created by ``Depot.open_namespace``; every ``Store`` has one.

    Open namespaces count towards the 2,048 that a process can use at a time.

    Attributes:
        native: the core's object, for kvdepot itself.
    """

    __slots__ = ("__weakref__", "_layout", "_on_close", "native")

    def __init__(
        self, native: _native.Namespace, on_close: Callable[[], None], layout: BlockLayout | None = None
    ) -> None:
        self.native = native
        self._on_close = on_close
        self._layout = layout

    @property
    def description(self) -> str:
        """Its facts and layout as text, with which ``Depot.open_namespace`` opens it in another process."""
        return self.native.canonical

    @property
    def id(self) -> str:
        """Its name, and that of its directory in a Posix tier: 32 hex digits, the same through all resets."""
        return self.native.id

    @property
    def layout(self) -> BlockLayout:
        """How its blocks are cut into shards and tensors."""
        if self._layout is None:
            runs = json.loads(self.native.canonical)["layout"]
            self._layout = BlockLayout.of_shards(sizes for count, sizes in runs for _ in range(count))
        return self._layout

    def close(self) -> None:
        """Tells the depot that this process does not use it any more. Idempotent.

        Stores of the same namespace stay open, and other ``Namespace`` objects, too: the last one counts. Waits up to 5
        s for a depot that hangs. Blocks stay stored.
        """
        self._on_close()


def facts_json(namespace: Mapping[str, object]) -> str:
    """Returns the facts of a namespace as JSON.

    Raises:
        ConfigError: there are none, or one has no JSON.
    """
    if not isinstance(namespace, Mapping):
        raise ConfigError(f"namespace: must be a dict, such as {{'model': ..., 'dtype': ...}}, got {namespace!r}")
    if not namespace:
        raise ConfigError(
            "namespace: must describe everything that changes the blocks' bytes, such as {'model': ..., 'dtype': ...}"
        )
    try:
        return json.dumps(namespace, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"namespace: must be text, integers, booleans, lists and dicts: {error}") from error
