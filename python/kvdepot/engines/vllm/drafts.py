"""KV of a draft (EAGLE, MTP) in addition to the model's own: which part of a block, and of a hit, is final.

A draft computes a token's KV from the token and the next one. So the KV of a block's last token depends on whatever
followed when it was computed: a speculated token that was rejected later, or another continuation. vLLM's own cache
therefore uses a block only if the next one matches, too: it drops the last block of every hit. The output never
depends on it, since the model verifies drafts; only the number of accepted drafts does.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvdepot.engines.vllm.groups import Group


@dataclass(frozen=True)
class Drafts:
    """The part of an engine's KV that belongs to a draft.

    Attributes:
        groups: indexes of the groups whose blocks have KV of a draft; empty = there is none.
        lookahead_tokens: tokens that the draft reads beyond those that a step of a prefill computes.
    """

    groups: frozenset[int] = frozenset()
    lookahead_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.groups)

    def final_blocks(self, group: "Group", end_tokens: int, prompt_tokens: int, known_blocks: int) -> int:
        """Returns the number of leading blocks that no later step writes to, when a step ends at ``end_tokens``.

        Args:
            group: the blocks' group.
            end_tokens: tokens of the request with KV at the step's end, including speculated ones.
            prompt_tokens: tokens of the request's prompt.
            known_blocks: blocks whose tokens are all known; a speculated token is not.
        """
        if group.index not in self.groups:
            return min(end_tokens // group.block_tokens, known_blocks)
        # Each module of a chain reads one token further, so the last tokens are written again.
        settled_tokens = end_tokens - max(0, self.lookahead_tokens - 1)
        blocks = min(settled_tokens // group.block_tokens, known_blocks)
        # The token after a block is the prompt's; after the last block it is this answer's, or the draft's guess.
        return max(0, blocks - 1) if blocks * group.block_tokens >= prompt_tokens else max(0, blocks)


def drafts_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Drafts:
    """Returns where an engine keeps a draft's KV: as its own cache does, in every group if none is marked.

    Nowhere without a draft, or if vLLM was configured to keep such blocks (``disable_eagle_block_drop``).
    """
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return Drafts()
    # Before 0.32 the drop could not be disabled.
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    if not drops():
        return Drafts()
    groups = kv_cache_config.kv_cache_groups
    marked = {index for index, group in enumerate(groups) if getattr(group, "is_eagle_group", False)}
    lookahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))
    return Drafts(frozenset(marked or range(len(groups))), lookahead)
