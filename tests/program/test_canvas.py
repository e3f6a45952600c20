"""Shapes become the right SVG elements and the right pixels."""

import builtins
import io
from typing import Any
from xml.etree import ElementTree

import pytest

from echelon.errors import UserError
from echelon.program.canvas import Box, Hatch, Picture, Rule, Shape, Words, _paint, moved

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
