"""Pictures of timelines, planned or measured: boxes where the spans are, with colours and labels."""

import builtins
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from echelon.errors import UserError
from echelon.program import Costs, Instruction, Op, Span, add_copies, build, simulate
from echelon.program import picture as picture_module
from echelon.program.picture import (
    Box,
    Hatch,
    Panel,
    Picture,
    Rule,
    Shape,
    Words,
    _paint,
    draw,
    draw_together,
    moved,
    nice_step,
)
from tests.program.cases import program_of

MEASURED = [
    Span(0, 100.0, 100.5, Instruction(Op.FORWARD, 0, 0)),
    Span(0, 100.5, 100.5, Instruction(Op.SEND_ACTIVATION, 0, 0, 1)),
    Span(1, 100.6, 101.0, Instruction(Op.FORWARD, 1, 0)),
    Span(1, 101.0, 102.0, Instruction(Op.BACKWARD, 1, 0)),
]


GOLDEN = Path(__file__).parent / "golden"


def make_pictures() -> dict[str, Picture]:
    """Every kind of shape: chunks, copies, narrow and wide boxes, many ranks, nothing, a measured step."""
    chunks = simulate(build("interleaved", (1, 1), 4, 3), Costs(reduce=1, update=2, transfer=0.5))
    copies = add_copies(build("1f1b", (1, 1), 2, ties=True))
    panels = [
        Panel(list(chunks.spans()), "chunks", "3 stages per rank"),
        Panel(
            list(simulate(copies, Costs(store=2, fetch=1, tie=1, norm=1, publish=1)).spans()),
            "copies",
            "S and T",
        ),
    ]
    ranks = [Span(rank, rank, rank + 3.5, Instruction(Op.FORWARD, rank, rank)) for rank in range(24)]
    return {
        "picture-together": draw_together(panels, 2, "seconds"),
        "picture-many-ranks": draw(ranks, 40, "40 ranks", "24 of them work"),
        "picture-some-ranks": draw(ranks[:16], 16, "16 ranks"),
        "picture-measured": draw(MEASURED, 2, "measured", axis="milliseconds"),
        "picture-empty": draw([], 1, "empty"),
        "picture-long": draw(
            [Span(0, k / 2, k / 2 + 0.5 + k % 3, Instruction(Op.BACKWARD_WEIGHT, 0, k)) for k in range(60)],
            1,
            "long",
        ),
    }


@pytest.mark.parametrize("name", make_pictures())
def test_each_picture_is_that_of_its_golden_file(name: str) -> None:
    assert make_pictures()[name].svg() == (GOLDEN / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("least", "step"),
    [
        (1.0, 1),
        (1.01, 2),
        (2.0, 2),
        (2.01, 5),
        (5.0, 5),
        (5.01, 10),
        (10, 10),
        (60, 100),
        (0.15, 0.2),
        (0.06, 0.1),
    ],
)
def test_steps_of_the_axis_are_round_numbers(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step, rel=1e-12)


def test_every_computation_is_a_box_on_the_row_of_its_rank() -> None:
    picture = draw(list(simulate(build("1f1b", (1,) * 4, 8)).spans()), 4, "title")
    boxes = [shape for shape in picture.shapes if isinstance(shape, Box) and shape.height > 14]
    assert len(boxes) == 4 * 8 * 2
    assert len({box.y for box in boxes}) == 4
    assert len([shape for shape in picture.shapes if isinstance(shape, Hatch)]) == 4 + 1
    names = [shape.text for shape in picture.shapes if isinstance(shape, Words)]
    assert names.count("F7") == 4
    assert {"title", "bubble", "rank 3", "F  forward", "B  backward", "22", "time"} <= set(names)


def test_measured_times_start_at_the_first_span_and_keep_their_proportions() -> None:
    picture = draw(MEASURED, 2, "measured", axis="seconds")
    first, second, third = [shape for shape in picture.shapes if isinstance(shape, Box) and shape.height > 14]
    assert (third.x + third.width - first.x) / third.width == pytest.approx(2.0)
    assert second.x - first.x == pytest.approx(0.6 * third.width)
    assert first.y < second.y == third.y


def test_the_svg_is_xml_and_titles_are_escaped() -> None:
    root = ElementTree.fromstring(draw(MEASURED, 2, "a < b & c\x00").svg())
    assert root.tag.endswith("svg")
    assert [title.text for title in root if title.tag.endswith("title")] == ["a < b & c "]


def test_kinds_of_work_and_chunks_have_colours_of_their_own() -> None:
    costs = Costs(reduce=1, update=1)
    split = draw(list(simulate(build("zero-bubble", (1, 1), 2), costs).spans()), 2, "")
    assert len({shape.edge for shape in split.shapes if isinstance(shape, Box)}) == 5
    chunks = draw(list(simulate(build("interleaved", (1, 1), 2, 2)).spans()), 2, "")
    forwards = {shape.fill for shape in chunks.shapes if isinstance(shape, Box) and shape.edge == "#0072b2"}
    assert len(forwards) == 2
    assert any(isinstance(shape, Words) and "darker" in shape.text for shape in chunks.shapes)


def test_the_png_shows_what_the_svg_does() -> None:
    image_module = pytest.importorskip("PIL.Image")
    picture = draw(MEASURED, 2, "measured")
    image = image_module.open(io.BytesIO(picture.png())).convert("RGB")
    assert image.size == (picture.width * 2, picture.height * 2)
    for box in (shape for shape in picture.shapes if isinstance(shape, Box)):
        corner = image.getpixel((round(box.x * 2) + 4, round(box.y * 2) + 4))
        assert corner == tuple(int(box.fill[at : at + 2], 16) for at in (1, 3, 5))
    hatch = next(shape for shape in picture.shapes if isinstance(shape, Hatch) and shape.height > 14)
    colours = image.crop(
        (int(hatch.x * 2) + 800, int(hatch.y * 2) + 4, int(hatch.x * 2) + 900, int(hatch.y * 2) + 40)
    )
    assert len(colours.getcolors()) >= 2


@pytest.mark.parametrize(("count", "shown"), [(10, "F211"), (66, "211"), (120, None)])
def test_a_name_without_room_loses_its_letter_and_then_goes(count: int, shown: str | None) -> None:
    spans = [Span(0, float(k), k + 1.0, Instruction(Op.FORWARD, 0, 211 + k)) for k in range(count)]
    names = {shape.text for shape in draw(spans, 1, "").shapes if isinstance(shape, Words)}
    assert names & {"F211", "211"} == ({shown} if shown else set())


def test_as_many_spans_as_allowed_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_module, "_MOST_SPANS", 3)
    assert draw(MEASURED, 2, "")  # three take time, a send does not
    with pytest.raises(UserError, match="4 computations are too many for a picture: at most 3"):
        draw([*MEASURED, MEASURED[0]], 2, "")


def test_nothing_at_all_and_far_too_much() -> None:
    assert draw([], 2, "empty").svg().count("rank") == 2
    with pytest.raises(UserError, match="too many for a picture"):
        draw([MEASURED[0]] * 50_001, 1, "")


def test_timelines_that_are_drawn_together_have_one_scale() -> None:
    half = [span._replace(start=span.start / 2, end=span.end / 2) for span in MEASURED]
    alone = draw(MEASURED, 2, "one")
    both = draw_together([Panel(MEASURED, "one"), Panel(half, "other", "about it")], 2, "seconds")
    boxes = [shape for shape in both.shapes if isinstance(shape, Box) and shape.height > 14]
    assert both.height == 2 * alone.height
    assert [round(box.width / later.width, 6) for box, later in zip(boxes[:3], boxes[3:], strict=True)] == [
        2
    ] * 3
    assert [round(later.y - box.y) for box, later in zip(boxes[:3], boxes[3:], strict=True)] == [
        alone.height
    ] * 3
    assert [shape.text for shape in both.shapes if isinstance(shape, Words) and shape.bold] == [
        "one",
        "other",
    ]
    ElementTree.fromstring(both.svg())


def test_copies_lie_below_the_computation_of_their_rank() -> None:
    program = program_of("rank 0: F0 S0 F1 T0 B0 B1 REDUCE NORM UPDATE PUBLISH")
    spans = list(simulate(program, Costs(store=1, fetch=1)).spans())
    svg = draw(spans, 1, "copies").svg()
    assert "S  store" in svg
    assert "T  fetch" in svg
    heights = {shape.height for shape in draw(spans, 1, "copies").shapes if isinstance(shape, Box)}
    assert len(heights) == 3, "computation, copies, and the legend"


BOX = Box(10, 20, 30, 40, "#d6e8f5", "#0072b2")
SHAPES: list[Shape] = [
    BOX,
    Hatch(50, 20, 40, 40),
    Rule(0, 90, 100, 90, "#5b6472"),
    Words(50, 95, "a < b", 11, anchor="middle", bold=True),
]


def elements(picture: Picture) -> list[ElementTree.Element]:
    """The elements of the shapes: those behind the title, the pattern and the page."""
    return list(ElementTree.fromstring(picture.svg()))[3:]


def test_each_shape_is_one_svg_element() -> None:
    box, hatch, rule, words = elements(Picture(100, 100, "title", SHAPES))
    assert [element.tag.rpartition("}")[2] for element in (box, hatch, rule, words)] == [
        "rect",
        "rect",
        "path",
        "text",
    ]
    assert (box.get("x"), box.get("y"), box.get("width"), box.get("height")) == (
        "10.0",
        "20.0",
        "30.0",
        "40.0",
    )
    assert (box.get("fill"), box.get("stroke")) == ("#d6e8f5", "#0072b2")
    assert hatch.get("fill") == "url(#bubble)"
    assert rule.get("d") == "M0.0 90.0L100.0 90.0"
    assert (words.text, words.get("text-anchor"), words.get("font-weight")) == ("a < b", "middle", "600")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_moves_down_and_not_aside(shape: Shape) -> None:
    (before,) = elements(Picture(100, 100, "", [shape]))
    (after,) = elements(Picture(100, 100, "", [moved(shape, 5)]))
    if isinstance(shape, Rule):
        assert after.get("d") == "M0.0 95.0L100.0 95.0"
    else:
        assert float(after.get("y", "")) == float(before.get("y", "")) + 5
        assert after.get("x") == before.get("x")


def test_control_characters_become_spaces() -> None:
    (words,) = elements(Picture(100, 100, "", [Words(0, 0, "a\x00b", 11)]))
    assert words.text == "a b"
    assert (words.get("text-anchor"), words.get("font-weight")) == ("start", None)


def test_the_png_has_the_colours_of_the_shapes_at_twice_the_size() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.open(io.BytesIO(Picture(100, 100, "", SHAPES).png())).convert("RGB")
    assert image.size == (200, 200)
    assert image.getpixel((50, 80)) == (0xD6, 0xE8, 0xF5)
    assert image.getpixel((5, 5)) == (0xFF, 0xFF, 0xFF)
    assert image.getpixel((20, 180)) == (0x5B, 0x64, 0x72)
    hatched = image.crop((100, 40, 180, 120))
    assert {colour for _, colour in hatched.getcolors()} >= {(0xF6, 0xF7, 0xF9), (0xC3, 0xC9, 0xD4)}


def test_a_png_has_shapes_where_they_are_and_a_border_on_all_sides() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.open(io.BytesIO(Picture(100, 80, "", SHAPES[:2]).png())).convert("RGB")
    white, border, edge = (0xFF, 0xFF, 0xFF), (0xD4, 0xD9, 0xE1), (0x00, 0x72, 0xB2)
    for near, far, along in ((0, 199, 70), (0, 159, 70)):
        is_across = far == 199
        line = [image.getpixel((k, along) if is_across else (along, k)) for k in range(far + 1)]
        assert line[near : near + 3] == [border, border, white]
        assert line[far - 2 : far + 1] == [white, border, border]
    row = [image.getpixel((x, 80)) for x in range(200)]
    assert [x for x, colour in enumerate(row) if colour == edge] == [20, 79]
    column = [image.getpixel((50, y)) for y in range(160)]
    assert [y for y, colour in enumerate(column) if colour == edge] == [40, 119]
    assert all(image.getpixel((x, y)) != white for x in (100, 179) for y in (40, 119))
    # A line is two pixels wide, and may reach one pixel out of the box.
    assert all(image.getpixel(place) == white for place in ((98, 80), (182, 80), (140, 38), (140, 122)))


class RecordingPen:
    """Keeps what it is asked to draw."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.calls.append((name, *arguments, *options.values()))


@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        (BOX, [("rounded_rectangle", (20, 40, 79, 119), 3, "#d6e8f5", "#0072b2")]),
        # Less than a pixel is one pixel, not one with its corners exchanged.
        (Box(1, 2, 0.25, 0.125, "a", "b"), [("rounded_rectangle", (2, 4, 2, 4), 3, "a", "b")]),
        (Rule(1, 2, 3, 4.5, "c"), [("line", [2, 4, 6, 9], "c", 2)]),
        (
            # Each line begins at the upper or right edge, and ends at the left or lower one.
            Hatch(5, 10, 20, 12),
            [
                ("rectangle", (10, 20, 49, 43), "#f6f7f9"),
                ("line", pytest.approx((29.796, 20, 10, 39.796)), "#c3c9d4", 2),
                ("line", pytest.approx((49, 20.592, 26.592, 43)), "#c3c9d4", 2),
                ("line", pytest.approx((49, 40.388, 46.388, 43)), "#c3c9d4", 2),
            ],
        ),
        (Hatch(3, 4, 0.25, 50), [("rectangle", (6, 8, 6, 107), "#f6f7f9")]),
    ],
)
def test_shapes_are_painted_at_twice_their_size(shape: Shape, calls: list[tuple[Any, ...]]) -> None:
    pytest.importorskip("PIL.Image")
    pen: Any = RecordingPen()
    _paint(pen, shape)
    assert pen.calls == calls


@pytest.mark.parametrize(("bold", "stroke"), [(False, 0), (True, 0.6)])
def test_words_are_painted_at_their_anchor(bold: bool, stroke: float) -> None:
    pytest.importorskip("PIL.Image")
    pen: Any = RecordingPen()
    _paint(pen, Words(5, 6, "text", 11, "#5b6472", "end", bold))
    ((name, position, text, colour, font, anchor, width),) = pen.calls
    assert (name, position, text, colour, anchor, width) == (
        "text",
        (10, 12),
        "text",
        "#5b6472",
        "rs",
        stroke,
    )
    assert font.size == 22


def test_without_pillow_a_png_is_rejected_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_pillow(name: str, *arguments: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(UserError, match="a PNG needs Pillow: pip install pillow"):
        Picture(10, 10, "", []).png()
