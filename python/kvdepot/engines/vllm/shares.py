"""Dumps of blocks that several ranks hold alike: each dumps a share, so that all their links carry it."""

from dataclasses import dataclass

from kvdepot.engines.vllm.meta import Blocks


@dataclass(frozen=True)
class Share:
    """A rank's part of the dumps.

    Attributes:
        index: which part.
        count: parts; 1 = this rank dumps all.
    """

    index: int = 0
    count: int = 1

    def of(self, blocks: Blocks) -> Blocks:
        """Those of a step's blocks that this rank dumps.

        All ranks are given the same blocks in the same order, so that every block is in one share, and shares are as
        equal as they can be. The first block's hash decides who begins: steps with a single block do not all meet the
        same rank.
        """
        if self.count == 1 or not blocks.pages:
            return blocks
        turn = int.from_bytes(blocks.hashes[0][-8:], "little")
        mine = slice((self.index - turn) % self.count, None, self.count)
        return Blocks(blocks.hashes[mine], blocks.pages[mine])


ALONE = Share()
"""Of a rank whose bytes no other rank holds."""
