"""Charts are well-formed for any numbers and names, and show what they were given."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.train.charts import Series, line_chart, sparkline

SVG = "{http://www.w3.org/2000/svg}"
WIDTH, HEIGHT = 720, 400


def draw(*series: Series, title: str = "title") -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(series, title, "x name", "y name"))


def texts(chart: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in chart.iter(f"{SVG}text")]


def lines(chart: ElementTree.Element) -> list[list[list[tuple[float, float]]]]:
    """Of each line its runs, of each run its points; the samples of the legend (relative h) left out."""
    paths = [path.get("d", "") for path in chart.iter(f"{SVG}path")]
    return [
        [
            [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", run)]
            for run in d.split("M")[1:]
        ]
        for d in paths
        if "h" not in d
    ]


def test_one_line_literally() -> None:
    chart = draw(Series("loss", [0, 50, 100], [0.0, 1.0, 0.5]))
    assert texts(chart) == [
        *("title", "loss"),
        *("0.0", "0.2", "0.4", "0.6", "0.8", "1.0"),
        *("0", "20", "40", "60", "80", "100"),
        *("x name", "y name"),
    ]
    ((run,),) = lines(chart)
    assert run == [(68.4, 346.0), (382.2, 70.0), (696.0, 208.0)]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1500.0], ["0", "500", "1,000", "1,500"]),
        ([0.0, 2.4e9], ["0", "5.0e8", "1.0e9", "1.5e9", "2.0e9", "2.5e9"]),
        ([1e-5, 3e-5], ["1.0e-5", "1.5e-5", "2.0e-5", "2.5e-5", "3.0e-5"]),
        ([-0.5, 0.25], ["-0.6", "-0.4", "-0.2", "0.0", "0.2", "0.4"]),
        ([7.0], ["2", "4", "6", "8", "10", "12"]),
    ],
)
def test_y_ticks_are_round_and_differ(values: list[float], labels: list[str]) -> None:
    chart = draw(Series("s", range(len(values)), values))
    assert texts(chart)[2 : 2 + len(labels)] == labels


def test_no_series_and_no_points_say_so() -> None:
    assert "no data" in texts(draw())
    assert "no data" in texts(draw(Series("empty", [], [])))
    assert "no data" in texts(draw(Series("lost", [1, 2], [math.nan, math.inf])))


def test_single_point_is_a_dot() -> None:
    chart = draw(Series("one", [3], [2]))
    assert len(list(chart.iter(f"{SVG}circle"))) == 1


def test_gap_where_a_value_is_not_finite() -> None:
    chart = draw(Series("s", [0, 1, 2, 3, math.inf, 5, 6], [1, 2, math.nan, 2, 2, 1, 1]))
    ((first, middle, last),) = lines(chart)
    assert [len(first), len(middle), len(last)] == [2, 1, 2]
    assert len(list(chart.iter(f"{SVG}circle"))) == 1


def test_many_points_are_thinned_and_the_spike_stays() -> None:
    values = [math.sin(place / 1000) for place in range(50_000)]
    values[31_415] = 9.0
    ((run,),) = lines(draw(Series("long", range(50_000), values)))
    assert 500 <= len(run) <= 1000
    spike_x, spike_y = min(run, key=lambda point: point[1])
    assert spike_y == 93.0  # 11 of the 12 from -2 to 10, on the pixels 346 to 70
    assert spike_x == pytest.approx(run[0][0] + (run[-1][0] - run[0][0]) * 31_415 / 50_000, abs=1)
    assert [x for x, _ in run] == sorted(x for x, _ in run)


def test_legend_wraps_and_the_plot_keeps_its_height() -> None:
    chart = draw(*(Series(f"a long name of line {index}", [0, 1], [0, index]) for index in range(30)))
    names = [element for element in chart.iter(f"{SVG}text") if "long name" in (element.text or "")]
    assert len({element.get("y") for element in names}) == 10
    assert chart.get("height") == str(HEIGHT + 9 * 20)
    assert max(float(element.get("x", "")) for element in names) < WIDTH - 100


def test_eighth_line_is_dashed() -> None:
    svg = line_chart([Series(str(index), [0, 1], [0, 1]) for index in range(8)], "t", "x", "y")
    assert svg.count("stroke-dasharray") == 2  # the line and its sample in the legend


def test_text_is_escaped() -> None:
    nasty = '<b> & "quotes" \x00\ud800 ]]>'
    chart = ElementTree.fromstring(line_chart([Series(nasty, [1], [1])], nasty, nasty, nasty))
    assert texts(chart).count('<b> & "quotes"    ]]>') == 4
    assert chart.findtext(f"{SVG}title") == '<b> & "quotes"    ]]>'


numbers = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.slow
@settings(deadline=None)
@given(points=st.lists(st.tuples(numbers, numbers), max_size=20), name=st.text(max_size=60))
def test_any_numbers_give_a_chart_that_stays_inside(points: list[tuple[float, float]], name: str) -> None:
    chart = draw(Series(name, [x for x, _ in points], [y for _, y in points]), title=name)
    for line in lines(chart):
        for run in line:
            for x, y in run:
                assert 0 <= x <= WIDTH
                assert 0 <= y <= HEIGHT
    assert len(texts(chart)) < 40


def test_sparkline_literally() -> None:
    assert sparkline([1, 2, 3, 5, 8]) == "▁▂▃▅█"
    assert sparkline([0, 7, math.nan, 3, math.inf]) == "▁█ ▄ "
    assert sparkline([4, 4, 4]) == "▄▄▄"
    assert sparkline([]) == ""
    assert sparkline([math.nan]) == " "


def test_sparkline_takes_means_to_fit() -> None:
    assert sparkline(range(80), width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 10, 5, 5], width=2) == "▄▄"


@settings(deadline=None)
@given(values=st.lists(numbers, max_size=200), width=st.integers(1, 100))
def test_sparkline_fits(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
