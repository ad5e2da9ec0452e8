"""Pipeline strings: a pool and the tiers under it, by the names that the Rust registry uses."""

from kvdepot.config.keys import nearest

POOLS = ("Cache", "Staging")
TIERS = ("Posix", "Slab", "Dax", "Remote", "Object", "Fake", "Empty")
TIERS_AVAILABLE = ("Posix", "Fake")


def split_pipeline(pipeline: str) -> tuple[str, tuple[str, ...]]:
    """The pool's word and the tiers' words, unchecked."""
    pool, *tiers = pipeline.split("|")
    return pool, tuple(tiers)


def pipeline_problem(pipeline: str) -> str | None:
    """What is wrong with a pipeline and what to write instead; ``None`` when nothing is."""
    pool, tiers = split_pipeline(pipeline)
    if pool not in POOLS:
        hint = nearest(pool, POOLS)
        said = f"did you mean {hint}?" if hint else f"write {' or '.join(POOLS)} first, as in Cache|Posix"
        return f"a pipeline begins with its pool, but {pool!r} is none: {said}"
    for tier in tiers:
        if tier not in TIERS:
            hint = nearest(tier, TIERS)
            said = f"did you mean {hint}?" if hint else f"tiers are {', '.join(TIERS)}"
            return f"{tier!r} is no tier: {said}"
        if tier not in TIERS_AVAILABLE:
            return f"this version does not have the tier {tier}: use {' or '.join(TIERS_AVAILABLE)}"
        if tiers.count(tier) > 1:
            return f"the tier {tier} stands in it twice: name it once (a Posix tier takes several directories)"
    if pool == "Staging" and not tiers:
        return "a Staging pool keeps nothing, so it needs a tier: write Staging|Posix"
    return None
