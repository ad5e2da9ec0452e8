"""The dashboard's panels as one HTML page of plots, drawn from Prometheus's answers. Grafana draws them otherwise."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT, LEFT, TOP = 330, 80, 58, 8
COLOURS = ("#2a7ae2", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c940d", "#0b7285", "#846358")
LINES_MAX = 4
GAP_STEPS = 4
STYLE = """
body { background: #fff; color: #222; font: 11px/1.35 "DejaVu Sans", sans-serif; margin: 12px; width: 696px; }
h1 { font-size: 15px; margin: 0; } h2 { font-size: 11.5px; margin: 0 0 2px; } p { margin: 2px 0 10px; }
main { display: grid; gap: 8px; grid-template-columns: 1fr 1fr; }
section { border: 1px solid #ddd; border-radius: 4px; min-width: 0; padding: 6px 8px; }
ul { display: flex; flex-wrap: wrap; gap: 0 12px; list-style: none; margin: 0; padding: 0; }
text { fill: #555; font-size: 10px; }
"""


@dataclass(frozen=True)
class Line:
    """One line of a panel: its name, and its points as times and numbers."""

    name: str
    points: Sequence[tuple[float, float]]


def page(title: str, note: str, panels: Sequence[tuple[str, str, Sequence[Line]]], times: tuple[float, float]) -> str:
    """Returns the page. A panel is its title, its unit and its lines."""
    sections = "".join(section(*panel, times) for panel in panels)
    head = f'<!DOCTYPE html><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"{head}<h1>{escape(title)}</h1><p>{escape(note)}</p><main>{sections}</main>"


def section(title: str, unit: str, lines: Sequence[Line], times: tuple[float, float]) -> str:
    """Returns one panel."""
    # Lines that are nothing but 0 say least.
    shown = sorted(lines, key=lambda line: -max((abs(value) for _, value in line.points), default=0))[:LINES_MAX]
    most = round_up(max((value for line in shown for _, value in line.points), default=0) or 1, unit)
    left_out = f"<li>and {len(lines) - len(shown)} more, none greater</li>" if len(lines) > len(shown) else ""
    named = [
        f'<li><span style="color:{colour}">━</span> {escape(line.name)}</li>'
        for line, colour in zip(shown, COLOURS, strict=False)
    ]
    plot = "".join([*scale(most, unit), *drawn(shown, most, times)])
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%">{plot}</svg>'
    return f"<section><h2>{escape(title)}</h2>{svg}<ul>{''.join(named)}{left_out}</ul></section>"


def round_up(value: float, unit: str) -> float:
    """Returns the next greater number that is easy to read."""
    if unit in ("bytes", "Bps"):
        return 2.0 ** math.ceil(math.log2(value))
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def scale(most: float, unit: str) -> Iterator[str]:
    """Yields lines across the plot, with their numbers."""
    for part in (0.0, 0.5, 1.0):
        y = height_of(part)
        yield f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(number(most * part, unit))}</text>'


def drawn(lines: Sequence[Line], most: float, times: tuple[float, float]) -> Iterator[str]:
    """Yields the lines, which have gaps where there was nothing to scrape."""
    start_s, end_s = times
    for line, colour in zip(lines, COLOURS, strict=False):
        for piece in pieces([point for point in line.points if math.isfinite(point[1])]):
            at = [
                f"{LEFT + (WIDTH - LEFT) * (time_s - start_s) / (end_s - start_s):.1f},{height_of(value / most):.1f}"
                for time_s, value in piece
            ]
            whole = " ".join(at if len(at) > 1 else at * 2)
            ends = 'stroke-linecap="round"'  # a point alone is a dot
            yield f'<polyline points="{whole}" fill="none" stroke="{colour}" stroke-width="1.5" {ends}/>'


def pieces(points: Sequence[tuple[float, float]]) -> Iterator[Sequence[tuple[float, float]]]:
    """Yields the points between gaps. A gap is longer than some of the shortest steps between points."""
    steps = [later - earlier for (earlier, _), (later, _) in pairwise(points)]
    begin = 0
    for at, step in enumerate(steps, 1):
        if step > GAP_STEPS * min(steps):
            yield points[begin:at]
            begin = at
    yield points[begin:]


def height_of(part: float) -> float:
    """Returns the place of a part of the greatest number."""
    return HEIGHT - TOP - (HEIGHT - 2 * TOP) * part


def number(value: float, unit: str) -> str:
    """Returns a number in one of Grafana's units."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "Bps"):
        for name in ("B", "KiB", "MiB", "GiB"):
            if value < 1024 or name == "GiB":
                return f"{value:.3g} {name}{'/s' if unit == 'Bps' else ''}"
            value /= 1024
    if unit == "s":
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:.3g}{'/s' if unit in ('ops', 'reqps') else ''}"
