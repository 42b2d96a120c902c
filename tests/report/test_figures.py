"""Whether all of a figure is to be seen."""

import itertools

import pytest

from ridgeline.report.draw import Bar, ratios
from ridgeline.report.draw import bars as bar_chart
from ridgeline.report.palette import LIGHT


@pytest.mark.parametrize("narrow", [True, False])
def test_a_whisker_of_a_busy_host_leaves_room_for_names(narrow):
    bars = [
        Bar(label=name, value=v, role="rung", text="1", spread=v * 40) for name, v in (("compile+graph", 3), ("m0", 1))
    ]
    figure = bar_chart(bars, "tokens/s")(LIGHT, narrow)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert min(label.get_window_extent().x0 for label in axes.get_yticklabels()) >= 0
    assert max(text.get_window_extent().x1 for text in axes.texts) <= figure.bbox.x1


@pytest.mark.parametrize("narrow", [True, False])
def test_nothing_of_the_overview_is_cut_off(narrow):
    names = [f"gpt2-c256+kv_heads=1, {batch} × 4096, bf16" for batch in (2, 4, 8)]
    figure = ratios(names, [1.9, 1.0, 0.8], ["1.90×", "1.00×", "0.80×"], "times as fast as PyTorch's best")(
        LIGHT, narrow
    )
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in (*axes.get_yticklabels(), *axes.texts, axes.xaxis.label)]
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= figure.bbox.x1 + 1
    assert all(below.y1 <= above.y0 for above, below in itertools.pairwise(boxes[: len(names)]))
