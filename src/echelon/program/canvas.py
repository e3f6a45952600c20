"""Boxes, words and lines in pixels, as SVG or as PNG. picture.py decides what they show."""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from echelon.errors import UserError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

INK, QUIET_INK = "#1c2433", "#5b6472"
_BACKGROUND, _BORDER = "#ffffff", "#d4d9e1"
_HATCH, _HATCH_LINE, _HATCH_STEP = "#f6f7f9", "#c3c9d4", 7
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_SHARPNESS = 2  # pixels of a PNG for each pixel of the picture


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str


class Hatch(NamedTuple):
    """A box of diagonal lines: a rank is idle."""

    x: float
    y: float
    width: float
    height: float


class Rule(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str


class Words(NamedTuple):
    x: float
    y: float
    text: str
    size: int
    colour: str = INK
    anchor: str = "start"
    bold: bool = False


Shape = Box | Hatch | Rule | Words


def moved(shape: Shape, down: float) -> Shape:
    """The same shape, further down."""
    if isinstance(shape, Rule):
        return shape._replace(y1=shape.y1 + down, y2=shape.y2 + down)
    return shape._replace(y=shape.y + down)


@dataclass(frozen=True)
class Picture:
    """Shapes on a white page with a border, readable on white and on dark pages."""

    width: int
    height: int
    title: str
    shapes: Sequence[Shape]

    def svg(self) -> str:
        """One self-contained SVG element."""
        hatch = (
            f'<pattern id="bubble" width="{_HATCH_STEP}" height="{_HATCH_STEP}" '
            'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="{_HATCH_STEP}" height="{_HATCH_STEP}" fill="{_HATCH}"/>'
            f'<path d="M0 0V{_HATCH_STEP}" stroke="{_HATCH_LINE}" stroke-width="1.5"/></pattern>'
        )
        elements = map(svg, self.shapes)
        return page(self.width, self.height, self.title, elements, f"<defs>{hatch}</defs>\n")

    def png(self) -> bytes:
        """The same as an image, twice as fine. Needs Pillow."""
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            raise UserError("a PNG needs Pillow: pip install pillow, or write an .svg") from None
        image = Image.new("RGB", (self.width * _SHARPNESS, self.height * _SHARPNESS), _BACKGROUND)
        pen = ImageDraw.Draw(image)
        pen.rectangle((0, 0, image.width - 1, image.height - 1), outline=_BORDER, width=_SHARPNESS)
        for shape in self.shapes:
            _paint(pen, shape)
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        return file.getvalue()


def page(width: int, height: int, title: str, elements: Iterable[str], definitions: str = "") -> str:
    """One self-contained SVG element: these on a page with a border."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{_FONT}">',
            f"<title>{_clean(title)}</title>",
            f'{definitions}<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
            f'fill="{_BACKGROUND}" stroke="{_BORDER}"/>',
            *elements,
            "</svg>",
            "",
        ]
    )


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … (and 0.5, 0.2, …) that is not below `least`: between ticks."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def svg(shape: Shape) -> str:
    """The SVG element of a shape."""
    match shape:
        case Box(x, y, width, height, fill, edge):
            style = f'rx="2" fill="{fill}" stroke="{edge}" stroke-width="0.8"'
            return f"<rect {_area(x, y, width, height)} {style}/>"
        case Hatch(x, y, width, height):
            return f'<rect {_area(x, y, width, height)} fill="url(#bubble)"/>'
        case Rule(x1, y1, x2, y2, colour):
            return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>'
        case Words(x, y, text, size, colour, anchor, bold):
            weight = ' font-weight="600"' if bold else ""
            position = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
            return f'<text {position} fill="{colour}"{weight}>{_clean(text)}</text>'


def _area(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'


def _clean(text: str) -> str:
    # XML cannot hold control characters, not even escaped.
    return escape("".join(character if character.isprintable() else " " for character in text))


def _paint(pen: "ImageDraw", shape: Shape) -> None:
    from PIL import ImageFont

    match shape:
        case Box(x, y, width, height, fill, edge):
            pen.rounded_rectangle(_corners(x, y, width, height), 3, fill, edge)
        case Hatch(x, y, width, height):
            _paint_hatch(pen, _corners(x, y, width, height))
        case Rule(x1, y1, x2, y2, colour):
            pen.line([_SHARPNESS * value for value in (x1, y1, x2, y2)], colour, _SHARPNESS)
        case Words(x, y, text, size, colour, anchor, bold):
            font = ImageFont.load_default(size * _SHARPNESS)
            position = (x * _SHARPNESS, y * _SHARPNESS)
            pen.text(position, text, colour, font, _ANCHORS[anchor], stroke_width=0.6 if bold else 0)


def _corners(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    right, bottom = max(x, x + width - 0.5), max(y, y + height - 0.5)
    return x * _SHARPNESS, y * _SHARPNESS, right * _SHARPNESS, bottom * _SHARPNESS


def _paint_hatch(pen: "ImageDraw", corners: tuple[float, float, float, float]) -> None:
    """Lines that fall to the left, cut at the edges of the box: Pillow does not clip."""
    left, top, right, bottom = corners
    pen.rectangle(corners, fill=_HATCH)
    height, step = bottom - top, _HATCH_STEP * _SHARPNESS * 1.414
    for number in range(1, int((right - left + height) / step) + 1):
        start = left + number * step  # where the line meets the upper edge
        over, under = max(0.0, start - right), min(height, start - left)
        if over < under:
            pen.line((start - over, top + over, start - under, top + under), _HATCH_LINE, _SHARPNESS)
