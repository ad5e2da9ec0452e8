"""Draws docs/images/first_token.svg from the table of times to first token in docs/benchmarks.md.

``python -m tools.plots.first_token`` writes the picture; ``--check`` fails when it is not that of the table.
"""

import argparse
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "first_token.svg"
TITLE = "Time to first token, prompt of 8192 tokens, milliseconds"
ROWS = {
    "cold, no connector": "computed, no cache",
    "vLLM's own prefix cache, no connector": "vLLM's own prefix cache",
    "kvdepot, from the pool": "kvdepot, from host memory",
    "kvdepot, after restart, from disk": "kvdepot, from disk, after kill -9 of everything",
    "vLLM's offloading, from memory": "vLLM's offloading, from host memory",
    "vLLM's offloading, after restart, from files": "vLLM's offloading, from disk, after a restart",
}
"""Rows of the table by their prefix, and their labels in the plot."""

WIDTH, LABEL, BAR, ROW = 760, 330, 340, 30
OURS, OTHERS = "#0b7285", "#adb5bd"


def figures(text: str) -> list[tuple[str, int]]:
    """Returns label and milliseconds of each bar, from the page.

    Raises:
        ValueError: a row is missing.
    """
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    found = []
    for begin, label in ROWS.items():
        row = next((row for row in rows if len(row) > 3 and row[0].split(" (")[0] == begin), None)
        match = re.match(r"\d+", row[3]) if row else None
        if match is None:
            raise ValueError(f"{PAGE.name} has no row {begin!r} with a figure for 8192 tokens")
        found.append((label, int(match[0])))
    return found


def draw(bars: list[tuple[str, int]]) -> str:
    """Returns the plot as SVG."""
    longest = max(value for _, value in bars)
    height = 60 + ROW * len(bars)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
            'font-size="14" role="img">'
        ),
        f"<title>{escape(TITLE)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="28" font-size="16" font-weight="bold">{escape(TITLE)}</text>',
    ]
    for index, (label, value) in enumerate(bars):
        top = 46 + ROW * index
        width = max(2, round(BAR * value / longest))
        colour = OURS if label.startswith("kvdepot") else OTHERS
        parts += [
            f'<text x="{LABEL - 8}" y="{top + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{top}" width="{width}" height="20" fill="{colour}"/>',
            f'<text x="{LABEL + width + 8}" y="{top + 15}">{value}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Writes the plot, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    picture = draw(figures(PAGE.read_text("utf-8")))
    if not parser.parse_args().check:
        PICTURE.write_text(picture, "utf-8")
        return 0
    if PICTURE.read_text("utf-8") != picture:
        sys.stderr.write(f"{PICTURE} is not that of {PAGE}: run python -m tools.plots.first_token\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
