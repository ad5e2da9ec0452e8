"""Pipeline strings: a pool and the tiers below it, by the names and rules of the Rust core."""

from kvdepot.config.keys import suggestion
from kvdepot.config.tier_table import LATER, TIERS

POOLS = ("Cache", "Staging")
TIERS_AVAILABLE = tuple(tier.name for tier in TIERS)
TIERS_KNOWN = (*TIERS_AVAILABLE, *LATER)


def normal_pipeline(pipeline: str) -> str:
    """Returns the normal spelling: no spaces, and ``Staging`` as the pool of a single tier."""
    words = [word.strip() for word in pipeline.split("|")]
    if len(words) == 1 and words[0] in TIERS_KNOWN:
        words.insert(0, "Staging")
    return "|".join(words)


def split_pipeline(pipeline: str) -> tuple[str, tuple[str, ...]]:
    """Splits a normal spelling into the pool's word and the tiers' words, unchecked."""
    pool, *tiers = pipeline.split("|")
    return pool, tuple(tiers)


def pipeline_problem(pipeline: str) -> str | None:
    """Returns the problem of a pipeline in its normal spelling and what to write; ``None`` if it is valid."""
    pool, tiers = split_pipeline(pipeline)
    if pool not in POOLS:
        said = suggestion(pool, POOLS, f"write {' or '.join(POOLS)} first, as in Cache|Posix")
        return f"a pipeline begins with its pool, but {pool!r} is not one: {said}"
    for tier in tiers:
        if tier in POOLS:
            return f"{tier} is a pool: name one pool, first"
        if tier not in TIERS_KNOWN:
            said = suggestion(tier, TIERS_KNOWN, f"tiers are {', '.join(TIERS_KNOWN)}")
            return f"{tier!r} is not a tier: {said}"
        if tier not in TIERS_AVAILABLE:
            return f"this version does not have the tier {tier}: use {', '.join(TIERS_AVAILABLE)}"
        if tiers.count(tier) > 1:
            return f"the tier {tier} is named twice: name it once (a Posix tier takes several directories)"
    if pool == "Staging" and not tiers:
        return "a Staging pool keeps nothing, so it needs a tier: write Staging|Posix"
    return None
