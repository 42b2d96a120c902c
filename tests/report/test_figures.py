"""Whether all of a figure is to be seen, and told apart."""

import itertools
from dataclasses import replace

import pytest

from report import samples
from ridgeline.report.draw import Bar, Gain, Line, ladder, lines, ratios, stacked
from ridgeline.report.draw import bars as bar_chart
from ridgeline.report.palette import LIGHT
from ridgeline.report.series import curve_sections


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


@pytest.mark.parametrize("narrow", [False, True])
def test_a_legend_stays_on_the_page(narrow):
    """Long names take fewer columns; a change of the first line's model is named without the model."""
    names = ["shakespeare-fast", *(f"shakespeare-fast+optimizer.algorithm=adamw+optimizer.lr={n}" for n in range(4))]
    curves = [{"figure": "loss", "name": name, "x": [1, 2], "y": [2.0, 1.0]} for name in names]
    (section,) = curve_sections(replace(samples.study(), curves=curves), 0)
    figure = section.chart(LIGHT, narrow)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        names[0], *(name.removeprefix(names[0]) for name in names[1:])
    ]  # fmt: skip
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_legend_of_a_ladder_names_what_is_here_wherever_it_begins():
    steps = [Gain(label="m0 → m1", ours=None, article=1.3), Gain(label="m1 → m2", ours=1.2, article=2.1)]
    bar = Bar(label="m0", value=1.0, role="rung", text="1")
    (legend,) = ladder([bar], steps, "tokens/s", "article")(LIGHT, False).legends
    assert [text.get_text() for text in legend.get_texts()] == ["article", "here"]


def test_losses_that_hide_each_other_are_drawn_as_differences_too():
    """Where all were looked at after the same steps: what each has above the first, levels left out."""
    first = {"figure": "loss", "name": "a", "x": [10, 20], "y": [2.5, 1.5]}
    level = {"figure": "loss", "name": "2-gram", "x": [0, 20], "y": [2.4, 2.4], "line": True}

    def panels(steps):
        curves = [first, {**first, "name": "b", "x": steps, "y": [2.75, 1.0]}, level]
        (section,) = curve_sections(replace(samples.study(), curves=curves), 0)
        return section.chart(LIGHT, False).axes

    _, lower = panels([10, 20])
    assert [list(line.get_ydata()) for line in lower.lines] == [[0.0, 0.0], [0.25, -0.5]]
    assert (lower.get_yscale(), lower.get_ylabel()) == ("linear", "above the first (nats)")
    assert len(panels([10, 30])) == 1


def test_a_narrow_legend_stays_in_its_drawing_and_lanes_have_a_colour_of_their_own():
    pytest.importorskip("matplotlib")
    phases = [{"forward": 3.0, "backward": 6.0, "optimizer": 0.2}, {"forward and backward": 8.0, "optimizer": 0.2}]
    for narrow in (False, True):
        figure = stacked(["m3", "r16"], phases, "milliseconds")(LIGHT, narrow)
        figure.canvas.draw()
        (legend,) = figure.legends
        assert legend.get_window_extent().x1 <= figure.bbox.x1
        colours = [handle.get_facecolor() for handle in legend.legend_handles]
        assert len(set(colours)) == len(colours) == 4


def test_lines_without_a_name_are_drawn_without_a_legend():
    pytest.importorskip("matplotlib")
    figure = lines([Line(label="", x=[0, 1], y=[2, 1])], "step", "loss")(LIGHT, False)
    assert not figure.legends
