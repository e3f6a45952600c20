"""Makes what the documentation shows: the drawn pictures, and the tables of measured numbers.

    python docs/generate.py                  pictures and tables
    python docs/generate.py --run runs/a     also the loss curve of that run

Numbers come from benchmarks/results/NAME.json alone (`python -m benchmarks NAME --out benchmarks/results`).
Those of benches are all in docs/benchmarks.md, between `<!-- benches: PART -->` and `<!-- end benches -->`;
with the name of a bench for PART, its rows are on another page too.
Records of tests are on the pages that explain them, between `<!-- results: NAME -->` and
`<!-- end results -->`.
The tables of a plan's fields and rules, between `<!-- plan: NAME -->` and `<!-- end plan -->`, come from the
descriptions in `echelon.plan`. Times in the README, between `<!-- speed -->` and `<!-- end speed -->`, are
those of results.
"""

import argparse
import base64
import dataclasses
import json
import math
import re
import shutil
import struct
import sys
import zlib
from collections.abc import Sequence
from html import escape
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echelon.collectives.layout import Layout
from echelon.data.image_batches import CLASS_NAMES, SyntheticImages
from echelon.plan import ASYNCHRONOUS_SCHEDULES, FIELDS, Plan
from echelon.plan.plan import RULES
from echelon.program import Costs, add_transfers, asynchronous, build, simulate
from echelon.program.picture import draw as draw_timeline
from echelon.quantities import heading, show_figure
from echelon.train.charts import Series, line_chart

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"

INK, QUIET, BORDER, PAPER = "#1c2433", "#5b6472", "#c9d0db", "#ffffff"
BLUE, ORANGE, GREEN, PINK, GREY = "#d6e8f5", "#fbdcc8", "#cdeee1", "#f4dfeb", "#eef1f5"
EDGES = {BLUE: "#0072b2", ORANGE: "#d55e00", GREEN: "#009e73", PINK: "#cc79a7", GREY: "#98a2b3"}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures and tables of the documentation.")
    parser.add_argument("--run", type=Path, help="a run folder whose loss.svg is shown")
    run = parser.parse_args().run
    PICTURES.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")
    if run is not None:
        shutil.copyfile(run / "loss.svg", PICTURES / "loss.svg")
    for page in pages():
        page.write_text(with_results(page.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def pictures() -> dict[str, str]:
    """Every drawn picture under its file name."""
    return {
        "layers.svg": draw_layers(),
        "step.svg": draw_step(),
        "ring.svg": draw_ring(),
        "ring-share.svg": draw_ring_share(),
        "buckets.svg": draw_buckets(),
        "save.svg": draw_save(),
        "zero.svg": draw_zero(),
        "hybrid.svg": draw_hybrid(),
        "samples.svg": draw_samples(),
        "memory.svg": draw_memory(),
        "tensor.svg": draw_tensor(),
        "images.svg": draw_images(),
        "experts.svg": draw_experts(),
        "moe-dense.svg": draw_moe_dense(),
        **{f"schedule-{name}.svg": draw_schedule(schedule) for name, schedule in SCHEDULE_PICTURES.items()},
    }


# --- tables of measured numbers -----------------------------------------------------------------------

_REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)
_BENCHES_REGION = re.compile(r"(<!-- benches: (\w+) -->\n).*?(<!-- end benches -->)", re.DOTALL)
_SPEED_REGION = re.compile(r"(<!-- speed -->\n).*?(<!-- end speed -->)", re.DOTALL)
_PLAN_REGION = re.compile(r"(<!-- plan: (\w+) -->\n).*?(<!-- end plan -->)", re.DOTALL)


def with_results(text: str) -> str:
    """The page with every region of results, and of a plan's description, replaced."""
    text = _PLAN_REGION.sub(lambda region: region[1] + _table(PLAN_TABLES[region[2]]()) + region[3], text)
    text = _SPEED_REGION.sub(lambda region: region[1] + _table(speed()) + region[2], text)
    text = _BENCHES_REGION.sub(lambda region: region[1] + bench_table(region[2]) + region[3], text)
    return _REGION.sub(lambda region: region[1] + results_table(region[2]) + region[3], text)


def plan_fields() -> list[list[str]]:
    """Each field of a plan with its axis, values, default and meaning."""
    lines = [["field", "axis", "values", "default", "meaning"], ["---"] * 5]
    for field in dataclasses.fields(Plan):
        entry = FIELDS[field.name]
        options = sorted(entry.options, key=len, reverse=True)
        words = rf"(?<![\w-])({'|'.join(map(re.escape, options))})(?![\w-])"
        values = re.sub(words, r"`\1`", entry.values) if options else entry.values
        lines += [[f"`{field.name}`", entry.axis, values, f"`{entry.show(field.default)}`", entry.meaning]]
    return lines


def plan_rules() -> list[list[str]]:
    """Each combination of fields that is refused, and why."""
    lines = [["combination", "why"], ["---"] * 2]
    for rule in RULES:
        why = rule.why if isinstance(rule.why, str) else str(rule.why.__doc__)
        lines += [[rule.case, re.sub(r"{plan\.(\w+)}", r"`\1`", why)]]
    return lines


# Of the README: (bench, case, contender).
SPEED = (
    ("data-parallel", "zero=0", "echelon"),
    ("data-parallel", "zero=3", "echelon"),
    ("pipeline", "1f1b", "echelon"),
    ("tensor", "gpt, tensor=2", "echelon"),
    ("one-gpu", "Llama 1.1B of transformers, B=8", "echelon compile=true"),
)


def speed() -> list[list[str]]:
    """Times of a step beside those of torch, as parts of them."""
    lines = [["beside", "plan or model", "part of its time", "on"], ["---"] * 4]
    for bench, case, contender in SPEED:
        result = json.loads((RESULTS / f"{bench}.json").read_text(encoding="utf-8"))
        (row,) = (each for each in result["rows"] if (each["case"], each["contender"]) == (case, contender))
        hardware, ratio = result["hardware"], row["ratio"]
        device = ", ".join(hardware["gpus"]) or f"{hardware['cores']} CPU cores"
        spread = f"{ratio['low']:.2f} … {ratio['high']:.2f}"
        lines += [[row["baseline"], f"`{case}`", f"{ratio['median']:.2f} ({spread})", device]]
    return lines


PLAN_TABLES = {"fields": plan_fields, "rules": plan_rules}


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def bench_table(part: str) -> str:
    """A part of docs/benchmarks.md, or the rows of the bench of this name."""
    if str(ROOT) not in sys.path:  # no package installs the benchmarks
        sys.path.insert(0, str(ROOT))
    from benchmarks import page

    parts = {"overview": page.overview, "sections": page.sections}
    return parts[part]() if part in parts else page.figures(part)


def results_table(name: str) -> str:
    """The settings of a record (the counts of tests) as a table, and below it where they come from."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if "cells" in result:
        return _matrix(result)
    if "table" in result:
        return _rows(result)
    lines = [[heading(name) for name in result["settings"]]]
    lines += [["---" if column < 2 else "---:" for column in range(len(lines[0]))]]
    lines += [list(starmap(_setting, result["settings"].items()))]
    return f"{_table(lines)}{_origin(result)}\n\n"


def _rows(result: dict[str, Any]) -> str:
    """A table with a line for each row of a record; nothing is shown where there is nothing."""
    rows = result["table"]
    lines = [[heading(name) for name in rows[0]], ["---", *["---:"] * (len(rows[0]) - 1)]]
    lines += [[_setting(name, value) if value else "" for name, value in row.items()] for row in rows]
    return f"{_table(lines)}{_origin(result)}\n\n"


def _matrix(result: dict[str, Any]) -> str:
    """A table for each group of plan words, a row for each model; below, why cells were refused."""
    groups: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for cell in result["cells"]:
        words = groups.setdefault(cell["group"], {})
        words.setdefault(cell["word"], {}).setdefault(cell["model"], []).append(cell)
    reasons: dict[str, int] = {}
    text = ""
    for group, words in groups.items():
        lines = [["model", *(f"`{word}`" if "=" in word else word for word in words)]]
        lines += [["---"] * len(lines[0])]
        for model in dict.fromkeys(model for cells in words.values() for model in cells):
            lines += [[model, *(_matrix_cell(cells.get(model, []), reasons) for cells in words.values())]]
        text += f"\n**{group}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"{number}. {reason}\n" for reason, number in reasons.items())
    return f"{text}\n{notes}\n{_origin(result)}\n\n"


def _matrix_cell(cells: Sequence[dict[str, Any]], reasons: dict[str, int]) -> str:
    """ "equal", or by the number of ranks where they differ; a refusal is "refused" and its number."""
    shown: dict[str, list[str]] = {}
    for cell in cells:
        word = cell["result"]
        if word == "refused":
            word += f" ({reasons.setdefault(_reason(cell['text']), len(reasons) + 1)})"
        shown.setdefault(word, []).append(str(cell["ranks"]))
    if len(shown) < 2:
        return "".join(shown)
    return "; ".join(f"{', '.join(ranks)}: {word}" for word, ranks in shown.items())


def _reason(text: str) -> str:
    """Why a training was refused, for any model: up to the fix."""
    text = re.sub(r"\b[A-Z]\w*(?:For[A-Z]\w*|LMHeadModel)\b", "the model", text)
    return text.split(";")[0].replace("|", "/").strip()


def _setting(name: str, value: Any) -> str:
    return show_figure(name, value) if name.endswith(("_bytes", "_seconds")) else str(value)


def _origin(result: dict[str, Any]) -> str:
    hardware = result["hardware"]
    machine = ", ".join([f"{hardware['cores']} cores of {hardware['cpu']}", *hardware["gpus"]])
    return f"*`{result['command']}`. {machine}, torch {result['versions']['torch']}, {result['date'][:10]}.*"


# --- drawing ------------------------------------------------------------------------------------------


class Drawing:
    """A picture in the making: boxes, words, lines and arrows in pixels, on a page of its own."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []
        self.words(24, 34, title, size=16, bold=True)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        *,
        size: int = 13,
        dashed: bool = False,
    ) -> None:
        style = f'fill="{fill}" stroke="{EDGES.get(fill, BORDER)}"'
        style += ' stroke-dasharray="4 3" fill-opacity="0.45"' if dashed else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} rx="4" {style}/>')
        if text:
            colour = QUIET if dashed else INK
            self.words(x + width / 2, y + height / 2 + 0.36 * size, text, size, "middle", colour)

    def image(self, x: float, y: float, edge: float, file: bytes) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{edge:g}" height="{edge:g}"'
        data = base64.b64encode(file).decode("ascii")
        style = 'style="image-rendering: pixelated"'
        self._parts.append(f'<image {place} {style} href="data:image/png;base64,{data}"/>')

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 13,
        anchor: str = "start",
        colour: str = INK,
        *,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f'<text {place} fill="{colour}"{weight}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = BORDER, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}"{dashes}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = QUIET) -> None:
        self.path(f"M{x1:g} {y1:g}L{x2:g} {y2:g}", colour)

    def path(self, data: str, colour: str = QUIET) -> None:
        """A line along `data`, with a head at its end."""
        style = f'fill="none" stroke="{colour}" stroke-width="1.5" marker-end="url(#head)"'
        self._parts.append(f'<path d="{data}" {style}/>')

    def svg(self) -> str:
        width, height = self._size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{QUIET}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img" font-family="{FONT}">',
                f"<title>{escape(self._title)}</title>",
                f"<defs>{head}</defs>",
                f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
                f'fill="{PAPER}" stroke="{BORDER}"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )


# --- the layers ---------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One row of the picture: rooms that may import those of lower rows, and never each other."""

    packages: tuple[str, ...]
    planned: tuple[str, ...]
    about: str


LAYERS = (
    Layer(("cli",), (), "commands; thin"),
    Layer(("verify", "report"), (), "what a person looks at"),
    Layer(("train",), (), "a whole run"),
    Layer(("engine",), (), "parallelize() composes a plan; steps"),
    Layer(("update", "memory", "planner"), (), "gradients to weights; less memory; predicts"),
    Layer(("parallel",), (), "strategies that divide the work"),
    Layer(("nn",), (), "how modules are called"),
    Layer(("state",), (), "who owns what; state in files"),
    Layer(("collectives",), (), "what ranks do together; the ledger"),
    Layer(("launching", "program"), (), "starts and watches ranks; a step as data"),
    Layer(("plan",), (), "a plan: pure data"),
    Layer(("errors", "quantities", "hardware", "version"), (), "errors; bytes as text; the machine"),
)
BESIDE = Layer(("models", "data"), (), "stand beside")


def draw_layers() -> str:
    top, row, left, width = 58, 43, 24, 500
    foot = top + len(LAYERS) * row + 12
    picture = Drawing(900, foot + 20, "The rooms of echelon. Imports point downward only.")
    for index, layer in enumerate(LAYERS):
        y = top + index * row
        names = [*layer.packages, *layer.planned]
        each = (width - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            planned = name in layer.planned
            x = left + place * (each + 8)
            picture.box(
                x,
                y,
                each,
                34,
                BLUE,
                name,
                dashed=planned,
                size=13 if len(names) < 4 else 11 if len(names) < 5 else 9,
            )
        picture.words(left + width + 16, y + 22, layer.about, 12, colour=QUIET)
    side = 772
    picture.words(side + 52, top - 8, BESIDE.about, 12, "middle", QUIET)
    for index, name in enumerate([*BESIDE.packages, *BESIDE.planned]):
        planned = name in BESIDE.planned
        picture.box(side, top + 4 + index * row, 104, 34, GREEN, name, dashed=planned)
    picture.box(left, foot - 11, 22, 14, BLUE, dashed=True)
    picture.words(left + 30, foot, "planned", 12, colour=QUIET)
    note = "A room on the right is used by train and above, and by the planner, never by a strategy."
    picture.words(left + 110, foot, note, 12, colour=QUIET)
    return picture.svg()


# --- tensor parallelism -------------------------------------------------------------------------------


def draw_tensor() -> str:
    picture = Drawing(900, 316, "One feed-forward of tensor=2: two sums, one each way")
    left, gap = 132, 112
    for rank, y in enumerate((78, 178)):
        picture.words(24, y + 35, f"rank {rank}", 12, colour=QUIET)
        picture.box(left, y, 72, 58, GREY, "x")
        picture.box(left + gap, y, 40, 58, BLUE, "enter", size=11)
        picture.box(left + gap + 62, y, 96, 58, ORANGE, f"x · A{'₁₂'[rank]}")
        picture.box(left + gap + 180, y, 84, 58, GREEN, "GeLU")
        picture.box(left + gap + 286, y, 104, 58, ORANGE, f"y{'₁₂'[rank]} · B{'₁₂'[rank]}")
        picture.box(left + gap + 412, y, 40, 58, BLUE, "leave", size=11)
        picture.box(left + gap + 474, y, 72, 58, GREY, "z")
        for begin, end in ((-40, 0), (40, 62), (158, 180), (264, 286), (390, 412), (452, 474)):
            picture.arrow(left + gap + begin, y + 29, left + gap + end, y + 29)
    for x in (left + gap + 20, left + gap + 432):
        picture.line(x, 136, x, 178, EDGES[BLUE], dash="4 3")
    picture.words(
        left + gap - 10, 266, "enter: nothing forward, the sum of gradients backward", 12, colour=QUIET
    )
    picture.words(left + gap - 10, 288, "leave: the sum forward, nothing backward", 12, colour=QUIET)
    return picture.svg()


# --- mixture of experts -------------------------------------------------------------------------------


def draw_experts() -> str:
    picture = Drawing(900, 346, "One mixture of experts of data=2 expert=2: two exchanges, two more backward")
    columns = {"tokens": 100, "gate": 206, "send": 322, "experts": 452, "back": 622, "sum": 738}
    for rank, y in enumerate((86, 196)):
        picture.words(24, y + 35, f"rank {rank}", 12, colour=QUIET)
        picture.box(columns["tokens"], y, 76, 58, GREY, "tokens")
        picture.box(columns["gate"], y, 84, 58, GREEN, "gate")
        picture.box(columns["send"], y, 96, 58, BLUE, "all-to-all", size=12)
        for index in range(4):
            picture.box(columns["experts"] + 35 * index, y, 31, 58, ORANGE, str(4 * rank + index))
        picture.box(columns["back"], y, 84, 58, BLUE, "all-to-all", size=12)
        picture.box(columns["sum"], y, 112, 58, GREY, "weighted sum", size=12)
        ends = ((176, 206), (290, 322), (418, 452), (590, 622), (706, 738))
        for begin, end in ends:
            picture.arrow(begin, y + 29, end, y + 29)
        picture.path(f"M{columns['gate'] + 42} {y + 58}v18H{columns['sum'] + 56}v-16")
        picture.words(columns["experts"] + 68, y + 90, "weights", 11, "middle", QUIET)
    for x in (columns["send"] + 48, columns["back"] + 42):
        picture.line(x, 144, x, 196, EDGES[BLUE], dash="4 3")
    picture.words(columns["experts"] + 68, 74, "8 experts, 4 on each rank", 12, "middle", QUIET)
    note = "Each exchange moves tokens × top_k × width. A shared expert computes while tokens travel."
    picture.words(24, 326, note, 12, colour=QUIET)
    return picture.svg()


def draw_moe_dense() -> str:
    """Validation losses of the bench moe-dense, one line for each seed."""
    path = RESULTS / "moe-dense.json"
    title = "Loss at equal active size: 8 experts, 2 for each token, and a dense model"
    if not path.exists():
        return line_chart([], title, "step", "validation loss, nats per byte")
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    series = [
        Series(f"{contender}, seed {seed}", settings["evaluated"], line)
        for contender, lines in settings["curves"].items()
        for seed, line in enumerate(lines)
    ]
    return line_chart(series, title, "step", "validation loss, nats per byte")


# --- the life of a step -------------------------------------------------------------------------------


def draw_step() -> str:
    picture = Drawing(900, 326, "One step of data=2 microbatches=2, seen from one rank")
    compute, network, left = 84, 146, 88
    picture.words(24, compute + 25, "computes", 12, colour=QUIET)
    picture.words(24, network + 25, "network", 12, colour=QUIET)
    works = [
        ("clear", 44, GREY),
        ("forward 0", 78, BLUE),
        ("backward 0", 122, ORANGE),
        ("forward 1", 78, BLUE),
        ("backward 1", 122, ORANGE),
        ("", 96, PAPER),
        ("squares", 62, GREEN),
        ("", 50, PAPER),
        ("scale, AdamW", 92, GREEN),
    ]
    starts, x = [], float(left)
    for text, width, fill in works:
        starts.append(x)
        if text:
            picture.box(x, compute, width - 4, 40, fill, text, size=12)
        x += width
    last, waiting, squares, summing, update = starts[4:]
    moves = [(last + 66, 50, "bucket 1"), (waiting + 2, 50, "bucket 2")]
    moves += [(waiting + 56, 36, "used?"), (summing, 46, "sums")]
    for begin, width, text in moves:
        picture.box(begin, network, width, 40, PINK, text, size=10)
    for begin, end in ((waiting, squares), (summing, update)):
        picture.line(begin - 2, compute - 12, begin - 2, 196, QUIET, "3 3")
        picture.line(end - 2, compute - 12, end - 2, 196, QUIET, "3 3")
        picture.words((begin + end) / 2 - 2, compute + 25, "waits", 12, "middle", QUIET)
    picture.words(24, 70, "program", 12, colour=QUIET)
    program = ["F0", "B0", "F1", "B1", "REDUCE", "NORM", "", "UPDATE", "PUBLISH"]
    for place, instruction in zip([*starts[1:], x], program, strict=True):
        picture.words(place, 70, instruction, 12, bold=True)
    notes = [
        "B0 only accumulates: nothing is sent. In B1 each bucket leaves as soon as it is complete.",
        "REDUCE waits for the buckets, and for one flag per parameter: did any replica use it?",
        "NORM: each rank squares its share of the gradients; one message sums loss, count and squares.",
        "UPDATE scales to the mean, clips and steps the optimizer. PUBLISH brings new buffers to all",
        "replicas (and new weights with zero=1, zero=2 and the parameter server).",
    ]
    for index, text in enumerate(notes):
        picture.words(left, 222 + 20 * index, text, 12)
    return picture.svg()


# --- the ring -----------------------------------------------------------------------------------------


def draw_ring() -> str:
    size, colours = 4, (BLUE, ORANGE, GREEN, PINK)
    picture = Drawing(900, 366, "Ring all-reduce on 4 ranks: each buffer is cut into 4 chunks")
    middle_x, middle_y, radius = 176, 204, 104
    for rank in range(size):
        angle = math.radians(90 * rank - 90)
        x, y = middle_x + radius * math.cos(angle), middle_y + radius * math.sin(angle)
        picture.box(x - 46, y - 24, 92, 50, GREY)
        picture.words(x, y - 8, f"rank {rank}", 12, "middle")
        for chunk in range(size):
            picture.box(x - 40 + 20 * chunk, y, 19, 18, colours[chunk], str(chunk), size=10)
    for rank in range(size):
        first, second = math.radians(90 * rank - 90 + 33), math.radians(90 * rank - 90 + 57)
        begin = f"M{middle_x + radius * math.cos(first):.1f} {middle_y + radius * math.sin(first):.1f}"
        end = f"{middle_x + radius * math.cos(second):.1f} {middle_y + radius * math.sin(second):.1f}"
        picture.path(f"{begin}A{radius} {radius} 0 0 1 {end}")
    left, top, cell = 430, 118, 68
    picture.words(left + 1.5 * cell, 76, "reduce-scatter: pass on, add", 13, "middle", bold=True)
    picture.words(left + 4.5 * cell + 12, 76, "all-gather: pass on, keep", 13, "middle", bold=True)
    for step in range(2 * (size - 1)):
        gather = step >= size - 1
        x = left + step * cell + 12 * gather
        picture.words(x + cell / 2 - 3, top - 12, f"step {step}", 12, "middle", QUIET)
        for rank in range(size):
            # The same rule as echelon.collectives.ring.
            chunk = (rank - (step - size + 1) + 1) % size if gather else (rank - step) % size
            picture.box(x, top + rank * 46, cell - 6, 38, colours[chunk], f"chunk {chunk}", size=12)
    for rank in range(size):
        picture.words(left - 12, top + rank * 46 + 24, f"rank {rank} sends", 12, "end", QUIET)
    picture.words(left, 332, "6 chunks of a quarter each: 2(N−1)/N = 1.5 buffers sent by every rank.", 12)
    return picture.svg()


def draw_ring_share() -> str:
    counts = list(range(2, 17))
    series = [
        Series("naive: the rank in the middle", counts, [size - 1 for size in counts]),
        Series("ring: every rank", counts, [2 * (size - 1) / size for size in counts]),
    ]
    return line_chart(series, "What the busiest rank sends in one all-reduce", "ranks", "buffers", 720, 320)


# --- buckets ------------------------------------------------------------------------------------------


def draw_buckets() -> str:
    picture = Drawing(900, 352, "Gradients leave in buckets while the backward pass goes on")
    left, layer, transfer = 124, 66, 84
    for top, overlapped in ((74, False), (208, True)):
        end = _draw_backward(picture, left, top, layer, transfer, overlapped)
        what = "buckets" if overlapped else "all at the end"
        picture.words(24, top + 4, what, 13, bold=True)
        picture.words(24, top + 38, "backward", 12, colour=QUIET)
        picture.words(24, top + 80, "all-reduce", 12, colour=QUIET)
        picture.line(end, top + 6, end, top + 100, QUIET, "3 3")
        picture.words(end + 8, top + 38, "optimizer", 12, colour=QUIET)
    ended = left + 6 * layer
    picture.line(left + 2 * layer + 12, 318, ended - 2, 318, EDGES[GREEN])
    hidden = "hidden: the network works, nobody waits"
    picture.words(left + 2 * layer + 12, 338, hidden, 12, colour=EDGES[GREEN])
    picture.line(ended + 2, 318, ended + transfer + 16, 318, EDGES[ORANGE])
    picture.words(ended + 2, 338, "waited", 12, colour=EDGES[ORANGE])
    return picture.svg()


def _draw_backward(
    picture: Drawing, left: float, top: float, layer: float, transfer: float, overlapped: bool
) -> float:
    """Six layers in three buckets of two; returns when the last all-reduce is done."""
    colours = (BLUE, GREEN, PINK)
    for index in range(6):
        x = left + index * layer
        picture.box(x, top + 16, layer - 4, 34, colours[index // 2], f"layer {6 - index}", size=12)
    free = left + 6 * layer
    for index in range(3):
        ready = left + 2 * (index + 1) * layer
        begin = ready + 12 if overlapped else free + (12 if index == 0 else 0)
        picture.box(begin, top + 58, transfer, 34, colours[index], f"bucket {index + 1}", size=12)
        if overlapped:
            picture.path(f"M{ready - 8:g} {top + 52:g}L{begin + 2:g} {top + 60:g}")
        free = begin + transfer + 4
    return free


# --- a save behind the steps ---------------------------------------------------------------------------


def draw_save() -> str:
    picture = Drawing(
        900, 250, "A save behind the steps: who copies and writes, and when a step waits for it"
    )
    rows = {"training": 74, "copy": 122, "write": 170}
    for name, top in rows.items():
        picture.words(24, top + 22, name, 13, bold=True)
    steps = ((156, "forward, backward", BLUE, 208), (368, "update", ORANGE, 72))
    for number in range(2):
        for x, text, colour, width in steps:
            picture.box(x + number * 300, rows["training"], width, 34, colour, text, size=12)
    picture.words(768, rows["training"] + 22, "…", 14)
    picture.line(110, 58, 110, 214, QUIET, "3 3")
    picture.words(112, 56, "engine.save", 12, colour=QUIET)
    picture.box(112, rows["copy"], 40, 34, PINK, "buffers", size=9)
    picture.box(156, rows["copy"], 128, 34, GREEN, "weights, state", size=12)
    picture.path(f"M286 {rows['copy'] + 17}L362 {rows['training'] + 38}")
    picture.box(288, rows["write"], 300, 34, GREEN, "hash and write each rank's files", size=12)
    picture.box(592, rows["write"], 128, 34, PINK, "manifest, name", size=12)
    picture.words(
        112,
        236,
        "only the copy of buffers comes before the next step; its update waits for the rest",
        12,
        colour=QUIET,
    )
    return picture.svg()


# --- what ZeRO shares out ------------------------------------------------------------------------------


def draw_zero() -> str:
    """Four ranks at each level; filled is what a rank holds, of 2 + 4 + 12 bytes per parameter."""
    picture = Drawing(900, 330, "What each of four ranks holds, in bytes per parameter (bf16, Adam)")
    kinds = (("weights", 2, BLUE), ("gradients", 4, ORANGE), ("optimizer state and masters", 12, GREEN))
    unit, top = 10.5, 92
    for level in range(4):
        left = 30 + level * 216
        held = [size if level < 3 - place else size / 4 for place, (_, size, _) in enumerate(kinds)]
        picture.words(left, top - 12, f"zero={level}: {sum(held):g} bytes", 13, bold=True)
        for rank in range(4):
            y = top + rank * 44
            x = float(left)
            for (_, size, colour), has in zip(kinds, held, strict=True):
                picture.box(x, y, size * unit, 32, PAPER, dashed=True)
                picture.box(x + (size - has) * unit * rank / 3, y, has * unit, 32, colour)
                x += size * unit + 3
    for place, (name, _, colour) in enumerate(kinds):
        picture.box(30 + place * 150, 284, 22, 16, colour)
        picture.words(60 + place * 150, 297, name, 12, colour=QUIET)
    return picture.svg()


def draw_hybrid() -> str:
    """Two groups of four ranks; each part in its colour, with the ranks that hold it one above the other."""
    layout, colours = Layout(Plan.parse("data=8 zero=3 shard=4")), (BLUE, ORANGE, GREEN, PINK)
    picture = Drawing(900, 318, "data=8 zero=3 shard=4: two copies of the weights, each over four ranks")
    left, width, tops = 150, 132, (66, 186)
    for rank, position in enumerate(layout.positions):
        x, y = left + position.part * (width + 14), tops[position.copy]
        picture.box(x, y, width, 52, colours[position.part], f"rank {rank}: part {position.part}")
    for group in layout.groups("copies"):
        first, second = (layout.position(rank) for rank in (group[0], group[-1]))
        x = left + first.part * (width + 14) + width / 2
        picture.line(x, tops[first.copy] + 52, x, tops[second.copy], QUIET, dash="4 3")
    for copy, y in enumerate(tops):
        picture.words(24, y + 31, f"copy {copy}", 13, bold=True)
        picture.words(left + 4 * (width + 14) + 4, y + 24, "along shard: gather,", 12, colour=QUIET)
        picture.words(left + 4 * (width + 14) + 4, y + 40, "reduce-scatter", 12, colour=QUIET)
    picture.words(24, 156, "along copies:", 12, colour=QUIET)
    picture.words(24, 172, "all-reduce", 12, colour=QUIET)
    notes = [
        "A gradient is reduce-scattered inside its group; then each part is summed over the groups.",
        "Put a group on one host: only the sums of parts, 1/4 of a gradient each, leave it.",
    ]
    for index, text in enumerate(notes):
        picture.words(left, 270 + 22 * index, text, 12)
    return picture.svg()


# --- memory -------------------------------------------------------------------------------------------

_MEMORY_COLOURS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PINK,
    "buffers": GREY,
}


def draw_memory() -> str:
    """One bar for each setting of the bench `memory`: peak bytes by category."""
    rows = json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))["rows"]
    picture = Drawing(900, 128 + 34 * len(rows), "Peak memory of one rank by category, under each setting")
    left, scale = 490, 320 / max(sum(row["extras"].values()) for row in rows)
    for place, row in enumerate(rows):
        x, y = float(left), 64 + 34 * place
        picture.words(24, y + 17, row["contender"], 12)
        for category, colour in _MEMORY_COLOURS.items():
            width = row["extras"][f"{category}_bytes"] * scale
            if width >= 0.5:
                picture.box(x, y, width, 24, colour)
                x += width
        total = sum(row["extras"].values())
        picture.words(x + 6, y + 17, show_figure("total_bytes", total), 12, colour=QUIET)
    for place, (category, colour) in enumerate(_MEMORY_COLOURS.items()):
        picture.box(24 + place * 130, 84 + 34 * len(rows), 22, 16, colour)
        picture.words(54 + place * 130, 97 + 34 * len(rows), category, 12, colour=QUIET)
    return picture.svg()


# --- samples ------------------------------------------------------------------------------------------


def draw_samples() -> str:
    picture = Drawing(900, 330, "From the corpus to the rows of a replica: a function of (seed, step)")
    left, cell, order = 124, 62, (5, 3, 6, 9, 1, 0, 4, 2, 8, 7)
    picture.words(24, 90, "windows", 12, colour=QUIET)
    for window in range(10):
        picture.box(left + window * cell, 68, cell - 4, 34, GREY, str(window))
    picture.box(left + 10 * cell + 6, 68, 104, 34, PAPER, "validation", size=12, dashed=True)
    picture.words(24, 170, "epoch 0", 12, colour=QUIET)
    for sample, window in enumerate(order):
        x = left + sample * cell
        picture.box(x, 148, cell - 4, 34, BLUE if sample % 4 < 2 else ORANGE, str(window))
        begin = left + window * cell + cell / 2 - 2
        picture.line(begin, 102, x + cell / 2 - 2, 148, "#dfe4ec")
    picture.words(left + 10 * cell + 6, 170, "epoch 1: a new order", 12, colour=QUIET)
    for step in range(2):
        x = left + step * 4 * cell
        picture.line(x, 192, x + 4 * cell - 4, 192, QUIET)
        picture.words(x + 2 * cell - 2, 210, f"step {step}: a global batch of 4", 12, "middle")
    picture.words(left + 9 * cell - 2, 210, "step 2 …", 12, "middle", QUIET)
    for row, (fill, text) in enumerate(((BLUE, "replica 0"), (ORANGE, "replica 1"))):
        y = 234 + row * 38
        picture.words(24, y + 20, text, 12, colour=QUIET)
        for step in range(2):
            for place in range(2):
                window = order[4 * step + 2 * row + place]
                picture.box(left + (4 * step + place) * cell, y, cell - 4, 30, fill, str(window))
    picture.words(left + 7 * cell, 258, "With one replica, or three, the", 12, colour=QUIET)
    picture.words(left + 7 * cell, 276, "global batch of a step is the same.", 12, colour=QUIET)
    return picture.svg()


# --- images -------------------------------------------------------------------------------------------


def draw_images() -> str:
    rows, side, scale = 2, 36, 3
    pixels = SyntheticImages("train", side).pixels(range(rows * len(CLASS_NAMES)))
    picture = Drawing(960, 320, "Synthetic images: two of each class")
    for number, image in enumerate(pixels):
        row, column = divmod(number, len(CLASS_NAMES))
        edge = side * scale
        x, y = 24 + column * (edge + 8), 62 + row * (edge + 8)
        picture.image(x, y, edge, png(image.transpose(1, 2, 0)))
        if row == rows - 1:
            picture.words(x + edge / 2, y + edge + 18, CLASS_NAMES[column], 12, "middle")
    return picture.svg()


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A file with these pixels, [height, width, 3]."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = {
        b"IHDR": struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(lines, 9),
        b"IEND": b"",
    }
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# --- schedules ----------------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """A schedule to draw, and the costs of its stages."""

    name: str
    replicas: tuple[int, ...] = (1,) * 4
    microbatches: int = 8
    chunks: int = 1
    batches: int = 1
    cost: Sequence[int] | int = 1


SCHEDULE_PICTURES = {
    "naive": Schedule("naive", microbatches=4),
    "gpipe": Schedule("gpipe"),
    "1f1b": Schedule("1f1b"),
    "replicated": Schedule("1f1b", (3, 1), 9, cost=(3, 1)),
    "interleaved": Schedule("interleaved", chunks=2),
    "zero-bubble": Schedule("zero-bubble"),
    "pipedream": Schedule("pipedream", microbatches=12),
    "pipedream-2bw": Schedule("pipedream-2bw", microbatches=4, batches=3),
}


def draw_schedule(schedule: Schedule) -> str:
    stages, taken = len(schedule.replicas), schedule.microbatches * schedule.batches
    program = build(schedule.name, schedule.replicas, schedule.microbatches, schedule.chunks)
    title = f"{schedule.name}: {stages} stages, {taken} microbatches"
    if schedule.batches > 1:
        program = add_transfers(asynchronous(schedule.name, stages, schedule.microbatches, taken=taken))
        title += f", {schedule.microbatches} per batch"
    if schedule.chunks > 1:
        title += f", {schedule.chunks} chunks per rank"
    if sum(schedule.replicas) > stages:
        title += f", of {' and '.join(map(str, schedule.replicas))} replicas"
    line = simulate(program, Costs(forward=schedule.cost, backward=schedule.cost))
    bubble = f"bubble {line.bubble_fraction} = {float(line.bubble_fraction):.1%}"
    about = f"{bubble}; in flight {_list(line.in_flight)}"
    about += f"; versions {_list(line.versions)}" if schedule.name in ASYNCHRONOUS_SCHEDULES else ""
    return draw_timeline(list(line.spans()), len(program.ranks), title, about).svg()


def _list(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


if __name__ == "__main__":
    main()
