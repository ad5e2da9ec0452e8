"""Counters in the text that a server gives to Prometheus."""


def counter(text: str, name: str) -> int:
    """Returns a counter, summed over its labels."""
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return int(sum(float(value) for value in values))
