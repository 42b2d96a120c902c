import dataclasses

import pytest

from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"context": 8, "stride": 0}, "stride must be at least 1, got 0"),
        ({"context": 8, "delay": 31}, "delay must be 0 to 30 frames, got 31"),
        ({"context": 8, "delay": -1}, "delay must be 0 to 30 frames, got -1"),
        ({"context": 8.0}, "context must be a whole number, got 8.0"),
        ({"context": 8, "stride": True}, "stride must be a whole number, got True"),
    ],
)
def test_impossible_windows_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        WindowSpec(**fields)


def test_span_counts_raw_frames_and_a_dict_makes_it_again():
    window = WindowSpec(context=128, stride=2, delay=30)
    assert window.span == 255
    assert WindowSpec(**dataclasses.asdict(window)) == window
