"""Pictures of timelines, planned or measured: boxes where the spans are, with colours and labels."""

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest

from echelon.errors import UserError
from echelon.program import Costs, Instruction, Op, Span, add_copies, build, simulate
from echelon.program import picture as picture_module
from echelon.program.canvas import Box, Hatch, Picture, Words, nice_step
from echelon.program.picture import Panel, draw, draw_together
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
