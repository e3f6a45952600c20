"""What this code would do on 8 to 16,384 GPUs, and what breaks first: predicted, counted or measured.

    python -m benchmarks.scale

writes benchmarks/results/scale.json and scale-limits.json, from which docs/generate.py makes the tables of
docs/scale.md.
"""

import json
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

from benchmarks.result import make_result
from echelon.collectives.layout import AXES, COMBINED_AXES, EXPERT_AXES, Layout
from echelon.launching.placement import RankReport, place
from echelon.plan import Plan
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.predict import predict
from echelon.planner.foresight.settings import settings_of
from echelon.planner.searching.search import search
from echelon.planner.shape.presets import preset_shape
from echelon.quantities import show_bytes, show_seconds

RESULTS = Path(__file__).parent / "results"
DEVICE, PER_NODE = "h100", 8
SIZES = (8, 64, 1024, 16384)
MODELS = {"llama3-405b": 8192, "deepseek-v3": 4096, "gpt-1t": 2048}  # tokens of a sequence
TOKENS = 2**24  # of a step on the most devices; a smaller cluster has a share of it, at least 2²⁰
LEAST_TOKENS = 2**20
# Interruptions that nobody had planned: 419 in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783, 3.3.4).
FAILURES = 419 / (54 * 24 * 3600 * 16384)  # per second and device


def batch_of(model: str, devices: int) -> int:
    """Sequences in a step."""
    tokens = max(LEAST_TOKENS, TOKENS * devices // SIZES[-1])
    return max(devices, tokens // MODELS[model]) if devices < SIZES[-1] else tokens // MODELS[model]


def forecast(model: str, devices: int) -> dict[str, Any]:
    """The best plan, and what it would take; or what would fit."""
    shape, cluster = preset_shape(model), read_cluster(f"{DEVICE}:{devices}")
    batch = batch_of(model, devices)
    found = search(shape, cluster, batch, sequence=MODELS[model], top=1)
    row = {"model": model, "GPUs": f"{devices:,}", "batch": f"{batch:,}"}
    if not found.best:
        return row | {"plan": found.advice, "step": "", "MFU": "", "tokens per day": "", "memory": ""}
    plan, predicted = found.best[0]
    return row | {
        "plan": f"`{plan}`",
        "step": show_seconds(predicted.step_seconds),
        "MFU": f"{predicted.mfu:.1%}",
        "tokens per day": f"{86400 * predicted.tokens_per_second / 1e9:,.1f} billion",
        "memory": show_bytes(predicted.peak),
    }


def start_bytes(devices: int) -> int:
    """What all ranks read of the store of torchrun when they agree on their devices: the decision, each."""
    hosts = [f"node{rank // PER_NODE:05}" for rank in range(devices)]
    gpus = [f"GPU-{number:036}" for number in range(PER_NODE)]
    reports = [RankReport(host, host, rank % PER_NODE, gpus) for rank, host in enumerate(hosts)]
    return devices * len(json.dumps(place(reports, None)))


def groups_of_rank(plan: Plan) -> int:
    """How many process groups a rank makes, beside the world: those of axes with more than one rank."""
    layout = Layout(plan)
    experts = ("expert", "expert_data", *EXPERT_AXES) if plan.expert > 1 else ()
    axes = (*AXES, *COMBINED_AXES, *experts)
    return len({tuple(layout.group(axis, 0)) for axis in axes if layout.largest_group(axis) > 1})


def save_rate() -> float:
    """Bytes per second at which one rank saves, measured."""
    record = json.loads((RESULTS / "checkpoint.json").read_text(encoding="utf-8"))
    row = next(
        row for row in record["rows"] if row["case"] == "save, 1 rank" and row["contender"] == "engine.save"
    )
    return float(12 * record["settings"]["parameters"] / row["seconds"]["median"])


def limits(model: str, devices: int, plan: str) -> dict[str, Any]:
    """What a run would lose to its size: at the start, to checkpoints, to failures."""
    parsed = Plan.parse(plan.strip("`"))
    settings = settings_of(parsed)
    state = preset_shape(model).num_parameters * settings.optimizer_bytes
    nodes = max(1, devices // PER_NODE)
    save = state / nodes / save_rate()
    between = 1 / (FAILURES * devices)
    every = sqrt(2 * save * between)
    return {
        "model": model,
        "GPUs": f"{devices:,}",
        "read at the start": show_bytes(start_bytes(devices)),
        "groups of a rank": str(groups_of_rank(parsed)),
        "checkpoint": show_bytes(state),
        "save": show_seconds(save),
        "between failures": _hours(between),
        "save every": _hours(every),
        "lost": f"{save / every + every / (2 * between):.1%}",
    }


def _hours(seconds: float) -> str:
    if seconds > 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds > 2 * 3600 else f"{seconds / 60:.0f} minutes"


def held_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["step"]:
            yield limits(row["model"], int(row["GPUs"].replace(",", "")), row["plan"])


def again(row: dict[str, Any]) -> str:
    """The step of a recorded plan, as it is predicted today."""
    devices, batch = (int(row[name].replace(",", "")) for name in ("GPUs", "batch"))
    cluster = read_cluster(f"{DEVICE}:{devices}")
    shape = preset_shape(row["model"])
    seconds = predict(shape, row["plan"].strip("`"), cluster, batch, MODELS[row["model"]]).step_seconds
    return show_seconds(seconds)


def main() -> None:
    rows = [forecast(model, devices) for model in MODELS for devices in SIZES]
    for name, table in (("scale", rows), ("scale-limits", list(held_rows(rows)))):
        result = make_result(name, "python -m benchmarks.scale", {"device": DEVICE}, [])
        text = json.dumps(result.to_dict() | {"table": table}, indent=2)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
