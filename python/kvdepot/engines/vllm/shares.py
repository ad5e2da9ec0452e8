"""Dumps of blocks that several ranks hold: each rank dumps a share, so that all their links are used."""

from dataclasses import dataclass

from kvdepot.engines.vllm.meta import Blocks


@dataclass(frozen=True)
class Share:
    """A rank's part of the dumps.

    Attributes:
        index: index of the part.
        count: number of parts; 1 = this rank dumps everything.
    """

    index: int = 0
    count: int = 1

    def of(self, blocks: Blocks) -> Blocks:
        """Returns the blocks of a step that this rank dumps.

        All ranks are given the same blocks in the same order, so every block is in exactly one share, and the shares
        are as equal as possible. The first block's hash determines which rank begins, so steps with a single block are
        spread over the ranks.
        """
        if self.count == 1 or not blocks.pages:
            return blocks
        turn = int.from_bytes(blocks.hashes[0][-8:], "little")
        return blocks.at(range((self.index - turn) % self.count, len(blocks.pages), self.count))


ALONE = Share()
"""The share of a rank whose bytes no other rank holds."""
