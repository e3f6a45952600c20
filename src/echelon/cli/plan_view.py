"""What `echelon plan` prints for a person: predictions and the plans of a search, in 80 columns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.quantities import show_bytes, show_seconds

if TYPE_CHECKING:
    from echelon.planner.cluster.cluster import Cluster
    from echelon.planner.foresight.prediction import Prediction
    from echelon.planner.searching.search import Found, SearchResult
    from echelon.planner.shape.shape import ModelShape
    from echelon.planner.validate.report import SourceErrors


def show_question(
    shape: "ModelShape", cluster: "Cluster", batch: int, sequence: int | None, screen: Console
) -> None:
    """Print what is asked: also the length that a model's own config has, which few people mean."""
    size, device = shape.num_parameters, cluster.device
    count = f"{size / 1e9:,.1f} billion" if size >= 1e9 else f"{size / 1e6:,.1f} million"
    tokens = f"{sequence or shape.sequence:,} tokens{'' if sequence else ' (the length of the model)'}"
    screen.print(
        f"{shape.name}, {count} parameters, on {cluster.count:,} × {device.name} with "
        f"{show_bytes(device.memory)}; a step has {batch:,} × {tokens}",
        markup=False,
    )


def show_prediction(prediction: "Prediction", screen: Console) -> None:
    """Print the bytes of each stage that differs, and the parts of a step."""
    each = prediction.memory
    names = [name for name in each[0]._fields if any(getattr(memory, name) for memory in each)]
    table = _table("memory", *(f"stage {stage}" for stage in prediction.stages))
    for name in (*names, "peak"):
        table.add_row(name, *(show_bytes(getattr(memory, name)) for memory in each))
    screen.print(table)
    parts = prediction.seconds._asdict()
    shown = [f"{name} {show_seconds(value)}" for name, value in parts.items() if value]
    screen.print(f"A step: {show_seconds(prediction.step_seconds)}: {', '.join(shown)}")
    fits = "fits" if prediction.fits else f"does not fit {show_bytes(prediction.capacity)} per device"
    screen.print(
        f"{prediction.tokens_per_second:,.0f} tokens/s, MFU {prediction.mfu:.1%}, HFU {prediction.hfu:.1%}; "
        f"{show_bytes(prediction.peak)} at the peak: {fits}"
    )


def show_search(result: "SearchResult", screen: Console) -> None:
    """Print a row per plan, and why others were cut. Words that all plans have stand above them."""
    if not result.best:
        screen.print(result.advice)
        return
    best = result.best
    common = _common_words(best)
    if common:
        screen.print(f"All plans: {' '.join(common)}", markup=False)
    has_bubbles = any(each.prediction.bubble for each in best)
    has_cost = any(each.prediction.cost for each in best)
    optional = [name for name, is_shown in (("bubble", has_bubbles), ("cost", has_cost)) if is_shown]
    table = _table("step", "MFU", "memory", *optional, "plan")
    table.columns[0].justify = "right"
    table.columns[-1].justify = "left"
    for plan, prediction in best:
        figures = {"bubble": f"{prediction.bubble:.1%}", "cost": f"{prediction.cost:.3g}"}
        table.add_row(
            show_seconds(prediction.step_seconds),
            f"{prediction.mfu:.1%}",
            show_bytes(prediction.peak),
            *(figures[name] for name in optional),
            Text(" ".join(word for word in plan.split() if word not in common)),
        )
    screen.print(table)
    for reason, count in sorted(result.cut.items(), key=lambda each: -each[1]):
        screen.print(f"{count:,} plans cut: {reason}", markup=False)
    if common:  # in one line, to be copied
        screen.print(f"The first, in full: {best[0].plan}", markup=False, soft_wrap=True)


def show_errors(sources: Mapping[str, "SourceErrors"], screen: Console) -> None:
    """Print a row per source: errors of step times, and the mean of peaks where they were measured."""
    table = _table("source", "rows", "refused", "mean", "median", "largest", "memory")
    for name, errors in sources.items():
        values = errors.to_dict()
        shares = ("mean_error", "median_error", "max_error", "memory_mean_error")
        cells = ["" if values[share] is None else f"{values[share]:.1%}" for share in shares]
        table.add_row(Text(name), str(values["rows"]), str(values["refused"]), *cells)
    screen.print(table)


def _common_words(best: tuple["Found", ...]) -> list[str]:
    """The words that all of several plans have."""
    plans = [each.plan.split() for each in best]
    return [word for word in plans[0] if all(word in plan for plan in plans)] if len(plans) > 1 else []


def _table(first: str, *others: str) -> Table:
    """Without lines beside cells, whose columns plans can use."""
    table = Table(first, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in others:
        table.add_column(name, justify="right")
    return table
