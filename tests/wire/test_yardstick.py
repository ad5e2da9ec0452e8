"""The bare socket that rates are compared with."""

from tools.wire.yardstick import stream_bytes_per_s


def test_a_stream_has_a_rate_however_little_time_there_is() -> None:
    assert stream_bytes_per_s(0) > 0
