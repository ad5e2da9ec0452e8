"""What a new user is told: which size of a depot would pay, in plain words."""

from collections.abc import Sequence
from dataclasses import dataclass

FEW_TOKENS = 100_000
"""Of fewer prompt tokens nothing can be said yet."""
LITTLE = 0.02
"""A part of the prompts for which nobody sets up a depot."""
NEARLY = 0.9
"""The part of what an endless depot gives that is good enough."""

GIB = 1 << 30


@dataclass(frozen=True)
class Size:
    """What a depot of one size would have given.

    Attributes:
        bytes: its size.
        tokens: prompt tokens that would have been loaded instead of computed.
        full: whether it was filled, so that the size mattered at all.
    """

    bytes: float
    tokens: int
    full: bool


@dataclass(frozen=True)
class Measured:
    """What was counted beside an engine.

    Attributes:
        prompt_tokens: of all requests.
        own_tokens: of these, what vLLM's own cache had.
        ceiling_tokens: what an endless depot would have given beyond that.
        sizes: what depots of certain sizes would have given, smallest first.
    """

    prompt_tokens: int
    own_tokens: int
    ceiling_tokens: int
    sizes: Sequence[Size]


def advise(measured: Measured) -> list[str]:
    """A line for what was seen, one a size, and last the recommendation."""
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
    """A size in GiB, as a person says it."""
    return f"{size / GIB:,.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.2g} GiB"
