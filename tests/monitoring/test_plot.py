"""The pictures of the dashboard draw nothing where Prometheus had nothing."""

from tools.monitoring.plot import pieces


def test_a_line_has_a_gap_where_nothing_was_scraped() -> None:
    before, after = [(0.0, 1.0), (2.0, 1.0), (4.0, 0.0)], [(60.0, 1.0), (62.0, 1.0)]
    assert list(pieces([*before, *after])) == [before, after]
    assert list(pieces([*before, *after, (122.0, 3.0)])) == [before, after, [(122.0, 3.0)]]


def test_evenly_spaced_points_are_one_line() -> None:
    points = [(at * 15.0, at % 3.0) for at in range(9)]
    assert list(pieces(points)) == [points]
