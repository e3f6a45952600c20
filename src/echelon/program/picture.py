"""A timeline as a picture: one row per rank, time to the right, the bubble hatched.

Planned and measured timelines are drawn by the same code, from spans, as boxes, words and lines in pixels;
and these as SVG or as PNG.
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from echelon.errors import UserError
from echelon.program.instruction import COMPUTE, Op
from echelon.program.simulate import Span
from echelon.program.text import LANES, labels, stages_of_ranks

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


# Light fills with dark edges, from the colours of Okabe and Ito: they differ for colour-blind readers too.
_KINDS = {
    Op.FORWARD: ("forward", "#d6e8f5", "#0072b2"),
    Op.BACKWARD: ("backward", "#fbdcc8", "#d55e00"),
    Op.BACKWARD_INPUT: ("backward for inputs", "#fdeecb", "#e69f00"),
    Op.BACKWARD_WEIGHT: ("backward for weights", "#cdeee1", "#009e73"),
    Op.REDUCE: ("reduce", "#f4dfeb", "#cc79a7"),
    Op.TIE: ("tie", "#dbeaf7", "#56b4e9"),
    Op.NORM: ("norm", "#faf7cf", "#b8ab1f"),
    Op.UPDATE: ("update", "#e4e7ed", "#5b6472"),
    Op.PUBLISH: ("publish", "#e9e2f5", "#7b5ab5"),
    Op.STORE: ("store", "#e8f3d6", "#6a9a2d"),
    Op.FETCH: ("fetch", "#f3e6d6", "#9a6a2d"),
}
_LANE = 0.2  # of the height of a row, for the copies of one direction
_LEFT, _RIGHT, _TOP, _FOOT = 84, 24, 96, 46
_CHARACTER = 6.4  # width of a character of 11 pixels
_MOST_SPANS = 50_000
_SHORTEST = 9  # pixels of a box with words in it


class Panel(NamedTuple):
    """One timeline of a picture: simulate(…).spans(), or spans as they were measured. `about` is printed
    below the title. Time starts at the first span."""

    spans: Sequence[Span]
    title: str
    about: str = ""

    @property
    def shown(self) -> list[Span]:
        return [span for span in self.spans if span.op in _KINDS and span.end > span.start]


class _Scale(NamedTuple):
    """From seconds and ranks to pixels."""

    start: float
    pixels: float  # per second
    row: float

    def x(self, seconds: float) -> float:
        return _LEFT + (float(seconds) - self.start) * self.pixels

    def y(self, rank: int) -> float:
        return _TOP + rank * self.row


def draw(spans: Sequence[Span], ranks: int, title: str, about: str = "", axis: str = "time") -> Picture:
    """The picture of one timeline; `axis` names the time and its unit."""
    return draw_together([Panel(spans, title, about)], ranks, axis)


def draw_together(panels: Sequence[Panel], ranks: int, axis: str = "time") -> Picture:
    """Timelines below each other, on one time scale."""
    spans_of_panels = [panel.shown for panel in panels]
    number = sum(map(len, spans_of_panels))
    if number > _MOST_SPANS:
        raise UserError(f"{number} computations are too many for a picture: at most {_MOST_SPANS}")
    starts, lengths = zip(*map(_extent, spans_of_panels), strict=True)
    longest = max(lengths)
    width = max(_width(spans, longest) for spans in spans_of_panels)
    row = max(14.0, min(34.0, 480 / max(1, ranks)))
    height = math.ceil(_TOP + ranks * row + _FOOT)
    shapes: list[Shape] = []
    for index, (panel, spans) in enumerate(zip(panels, spans_of_panels, strict=True)):
        scale = _Scale(starts[index], (width - _LEFT - _RIGHT) / longest, row)
        drawn = _panel(panel, spans, scale, lengths[index], ranks, width, axis)
        shapes += [moved(shape, index * height) for shape in drawn]
    return Picture(width, height * len(panels), panels[0].title, tuple(shapes))


def _extent(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the start of the first span, and the seconds from there to the end of the last."""
    start = min((float(span.start) for span in spans), default=0.0)
    return start, max((float(span.end) for span in spans), default=1.0) - start


def _panel(
    panel: Panel, spans: Sequence[Span], scale: _Scale, length: float, ranks: int, width: int, axis: str
) -> Iterator[Shape]:
    yield Words(24, 32, panel.title, 16, bold=True)
    yield Words(24, 54, panel.about, 12, QUIET_INK)
    yield from _legend(spans)
    yield from _axis(scale, length, ranks, width, axis)
    for rank in range(ranks):  # the bubble: a row is hatched from start to end, and work is drawn over it
        y = scale.y(rank)
        yield Hatch(_LEFT, y, length * scale.pixels, scale.row - 4)
        yield Words(_LEFT - 12, y + scale.row / 2 + 2, f"rank {rank}", 12, QUIET_INK, "end")
    yield from _work(scale, spans, labels(spans))


def _width(spans: Sequence[Span], length: float) -> int:
    """Wide enough for the labels, if that is not too wide."""
    durations = sorted(float(span.seconds) for span in spans)
    typical = durations[len(durations) // 4] if durations else length
    characters = max(map(len, labels(spans)), default=0)
    return round(min(1600.0, max(900.0, _LEFT + _RIGHT + length / typical * (8 * characters + 8))))


def _legend(spans: Sequence[Span]) -> Iterator[Shape]:
    x = 24.0
    ops = {span.op for span in spans}
    for op, (name, fill, edge) in _KINDS.items():
        if op in ops:
            yield Box(x, 66, 22, 14, fill, edge)
            yield Words(x + 30, 77, f"{op.value if op in COMPUTE else op.value[0]}  {name}", 12)
            x += 62 + 6.8 * (len(name) + 2)
    yield Hatch(x, 66, 22, 14)
    yield Words(x + 30, 77, "bubble", 12)
    if any(len(held) > 1 for held in stages_of_ranks(spans).values()):
        yield Words(x + 100, 77, "a, b ...: the stages of a rank in order; later ones are darker", 12)


def _axis(scale: _Scale, length: float, ranks: int, width: int, axis: str) -> Iterator[Shape]:
    foot = scale.y(ranks) + 4
    yield Rule(_LEFT, foot, width - _RIGHT, foot, QUIET_INK)
    step = nice_step(60 / scale.pixels)
    for number in range(math.floor(length / step + 1e-6) + 1):
        x = scale.x(scale.start + number * step)
        yield Rule(x, foot, x, foot + 5, QUIET_INK)
        yield Words(x, foot + 18, f"{number * step:g}", 11, QUIET_INK, "middle")
    yield Words(width - _RIGHT, foot + 36, axis, 11, QUIET_INK, "end")


def _work(scale: _Scale, spans: Sequence[Span], texts: Sequence[str]) -> Iterator[Shape]:
    stages = stages_of_ranks(spans)
    has_copies = any(span.op in LANES for span in spans)
    for span, label in zip(spans, texts, strict=True):
        _, fill, edge = _KINDS[span.op]
        held = stages[span.rank]
        depth = held.index(span.instruction.stage) / max(1, len(held) - 1)  # later chunks are darker
        x, y = scale.x(float(span.start)), scale.y(span.rank)
        width, height = float(span.seconds) * scale.pixels, scale.row - 4
        if has_copies:  # the lower part of a row is theirs
            part = height * _LANE
            lane = list(LANES).index(span.op) if span.op in LANES else None
            y += 0 if lane is None else height - part * (len(LANES) - lane)
            height = height - len(LANES) * part if lane is None else part
        yield Box(x, y, width, height, _mixed(fill, edge, 0.4 * depth), edge)
        for text in (label, label[1:]):
            if _CHARACTER * len(text) <= width - 2 and text and height > _SHORTEST:
                yield Words(x + width / 2, y + height / 2 + 4, text, 11, INK, "middle")
                break


def _mixed(one: str, other: str, share: float) -> str:
    """A colour between two, `share` of the way."""
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in pairs)
