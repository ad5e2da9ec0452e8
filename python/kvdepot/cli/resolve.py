"""The namespace that a verb names: as directories of a Posix tier list it, or as the running depot knows it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvdepot import _native
from kvdepot.cli.known import KnownNamespace, known_to
from kvdepot.cli.places import Places, one_root, stored_in
from kvdepot.cli.targets import Target
from kvdepot.errors import ConfigError, CorruptError, KVDepotError, UnavailableError
from kvdepot.stored.namespaces import StoredNamespace


@dataclass(frozen=True)
class Resolved:
    """A namespace that was found.

    Attributes:
        namespace: its description, the latest epoch that is known, and the directories that list it.
        known: as the running depot knows it; ``None`` if none runs, or it does not know the namespace.
    """

    namespace: StoredNamespace
    known: KnownNamespace | None

    @property
    def root(self) -> str:
        """Its name, 32 hex digits."""
        return self.namespace.root

    def open_in(self, depot: _native.Depot) -> _native.Namespace:
        """Opens the namespace at a depot.

        Raises:
            CorruptError: its description is that of another namespace.
        """
        opened = depot.open_namespace(json.dumps(self.namespace.facts), layout_json(self.namespace))
        if opened.id != self.root:
            raise CorruptError(f"namespace {self.root} cannot be opened: its facts and layout make {opened.id}")
        return opened

    def open_with_tiers(self, depot: _native.Depot) -> _native.Namespace:
        """Opens the namespace at a depot, for a caller that needs what the tiers have of it.

        Raises:
            CorruptError: its description is that of another namespace.
            UnavailableError: a tier does not answer about namespaces that were opened lately, and this may be one.
        """
        opened = self.open_in(depot)
        if waiting := json.loads(depot.stats_json())["depot"]["namespaces_provisional"]:
            raise UnavailableError(
                f"a tier does not answer about {waiting} namespaces, so the depot cannot tell what its tiers have of "
                f"{self.root}: the depot's log names the tier; try again when it answers"
            )
        return opened


def layout_json(namespace: StoredNamespace) -> str:
    """Returns a namespace's layout as the core spells it."""
    return json.dumps([[count, list(tensors)] for count, tensors in namespace.layout])


def namespace_of(target: Target, prefix: str, *, removes: bool = False) -> Resolved:
    """Returns the only namespace whose name begins with ``prefix``, in the directories or at the running depot.

    Args:
        target: the depot.
        prefix: the first digits of the name.
        removes: whether its blocks are then removed. If the running depot cannot be asked, its whole name is needed,
            because the depot may know another one with this prefix.

    Raises:
        ConfigError: there is none, there are several, or it cannot be read.
        UnavailableError: no depot runs, and there are no directories; or the depot would have to be asked.
        StorageError: a directory cannot be read.
    """
    if removes and not prefix:  # a variable of a script that is not set
        raise ConfigError("the namespace's name is empty: `kvdepot namespaces` lists the names")
    if not target.directories and target.running is None:
        raise UnavailableError(
            f"{target.config.pipeline} has no Posix tier that lists namespaces, and no depot runs with this "
            "configuration: start it with kvdepot serve, or name its --socket, or --directory"
        )
    stored = {one.root: one for one in (stored_in(target.directories) if target.directories else ())}
    known: Mapping[str, KnownNamespace] = {}
    trouble = ""
    if target.running is not None:
        try:
            known = known_to(target.running.socket, prefix.lower())
        except KVDepotError as error:
            trouble = str(error)  # directories may list it all the same
    if not any(root.startswith(prefix.lower()) for root in (*stored, *known)):
        raise _not_found(target, prefix, trouble)
    root = one_root({*stored, *known}, prefix)
    if trouble and removes and root != prefix.lower():
        raise UnavailableError(
            f"{target.text} cannot be asked whether it knows other namespaces that begin with {prefix}: {trouble}. "
            f"The directories have {root}: repeat the command with this whole name"
        )
    if root not in known:
        if stored[root].problem:
            raise ConfigError(f"namespace {root} cannot be read: {stored[root].problem}")
        return Resolved(stored[root], None)
    described = known[root].namespace
    if root in stored:
        epoch = max(stored[root].epoch, described.epoch)
        described = replace(described, directories=stored[root].directories, epoch=epoch)
    return Resolved(described, known[root])


def epoch_of(target: Target, found: Resolved) -> int | None:
    """Returns a namespace's epoch at the running depot now; ``None`` if it does not know the namespace any more.

    Raises:
        UnavailableError: the depot does not answer any more.
    """
    if target.running is None:
        return None
    known = known_to(target.running.socket, found.root).get(found.root)
    return None if known is None else known.namespace.epoch


def _not_found(target: Target, prefix: str, trouble: str) -> KVDepotError:
    if trouble and not target.directories:
        return UnavailableError(f"{target.text} cannot be asked for its namespaces: {trouble}")
    media, unread = Places((), target.media).open_media()
    on = sorted({(one.root, str(one.path)) for medium in media for one in medium.namespaces})
    on = [(root, path) for root, path in on if root.startswith(prefix.lower())]
    if on:
        root, path = on[0]
        return ConfigError(
            f"{target.text} does not know namespace {root}. {path} has blocks of it, but keeps no facts, without which "
            "it cannot be opened: let an engine that uses it attach, and repeat the command"
        )
    places = [str(one) for one in (*target.directories, *target.media) if str(one) not in unread]
    asked = [*places, *([] if target.running is None or trouble else [target.text])]
    text = f"no namespace begins with {prefix} in {', '.join(asked)}: `kvdepot namespaces` lists them"
    if target.running is not None and not trouble:
        text += ". A depot knows those that were opened since it started: let an engine attach, and repeat the command"
    for path, error in (*unread.items(), *([(target.text, trouble)] if trouble else [])):
        text += f". {path} was left out: {error}"
    return ConfigError(text)
