"""Advice for a new user, in plain words: which size of a depot would pay off."""

from collections.abc import Sequence
from dataclasses import dataclass

FEW_TOKENS = 100_000
"""With fewer prompt tokens no advice is given yet."""
LITTLE = 0.02
"""Share of the prompts that is not worth setting up a depot."""
NEARLY = 0.9
"""Share of an unlimited depot's benefit that is good enough."""

GIB = 1 << 30


@dataclass(frozen=True)
class Size:
    """Estimated benefit of a depot of one size.

    Attributes:
        bytes: its size.
        tokens: prompt tokens that would have been loaded instead of computed.
        full: whether it was ever full, so that its size mattered.
    """

    bytes: float
    tokens: int
    full: bool


@dataclass(frozen=True)
class Measured:
    """Counts measured next to a running engine.

    Attributes:
        prompt_tokens: prompt tokens of all requests.
        own_tokens: prompt tokens that vLLM's own cache had.
        ceiling_tokens: further tokens that an unlimited depot would have given.
        sizes: benefit of depots of certain sizes, smallest first.
    """

    prompt_tokens: int
    own_tokens: int
    ceiling_tokens: int
    sizes: Sequence[Size]


def advise(measured: Measured) -> list[str]:
    """Returns a line with the totals, one per size, and last the recommendation."""
    prompts = max(1, measured.prompt_tokens)
    own, ceiling = measured.own_tokens / prompts, measured.ceiling_tokens / prompts
    seen = f"{measured.prompt_tokens:,} prompt tokens: vLLM's own cache had {own:.1%}"
    lines = [f"{seen}, an endless depot would give {ceiling:.1%} more"]
    for size in measured.sizes:
        room = "" if size.full else ", and is not full yet"
        lines.append(f"a depot of {gib(size.bytes)} would give {size.tokens / prompts:.1%} more{room}")
    return [*lines, _recommendation(measured, prompts)]


def _recommendation(measured: Measured, prompts: int) -> str:
    best = max(measured.ceiling_tokens, max((size.tokens for size in measured.sizes), default=0))
    if measured.prompt_tokens < FEW_TOKENS:
        return f"too little was seen to recommend a size: wait for {FEW_TOKENS:,} prompt tokens"
    if best / prompts < LITTLE:
        return f"a depot does not pay for this load: not even an endless one would give {LITTLE:.0%} of its prompts"
    enough = [size for size in measured.sizes if size.tokens >= NEARLY * best]
    if enough:
        size = enough[0]
        return (
            f"recommended: a depot of {gib(size.bytes)}, which saves computing {size.tokens / prompts:.1%} of all "
            f"prompt tokens; an endless one would save {best / prompts:.1%}"
        )
    if not measured.sizes:
        return f"a depot would save computing up to {best / prompts:.1%} of all prompt tokens"
    size = measured.sizes[-1]
    return (
        f"recommended: a depot of more than {gib(size.bytes)}, which saves computing {size.tokens / prompts:.1%} of "
        f"all prompt tokens where an endless one would save {best / prompts:.1%}; a tier on disk below the pool may do"
    )


def gib(size: float) -> str:
    """Formats a size in GiB for people."""
    return f"{size / GIB:,.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.2g} GiB"
