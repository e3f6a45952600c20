"""Rows of published runs: from the columns of a CSV file to a model, settings, a cluster and a batch.

What a row leaves out is filled in by rule, never from what it measured:

    heads       as near to 128 numbers as divides the width
    microbatch  the fastest that fits
    recompute   none
    precision   bf16; fp8 in MLPerf
    vpp         as another row of the same source, model, device and stages states it; else 1
"""

import csv
from pathlib import Path
from typing import NamedTuple

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.predict import forecast_of
from echelon.planner.foresight.prediction import Prediction
from echelon.planner.foresight.settings import Settings
from echelon.planner.shape.shape import ModelShape
from echelon.planner.validate.columns import Row, integer, measured, text
from echelon.planner.validate.golden import is_golden, row_of_golden
from echelon.planner.validate.machines import cluster_of_row
from echelon.planner.validate.practices import practice_of
from echelon.planner.validate.shapes import shape_of_row

_CONTEXT = 2.5 * 2**30


class Run(NamedTuple):
    """A published run: what was trained, where and how, and what was measured."""

    source: str
    shape: ModelShape
    cluster: Cluster
    practice: Practice
    settings: Settings
    batch: int
    seconds: float | None
    peak: float | None  # bytes
    overhead: float  # bytes that the measured peak counts beside those of the model
    is_last_rank: bool  # whose peak it is; else that of the fullest

    def predict(self) -> Prediction:
        return forecast_of(self.shape, self.cluster, self.practice).predict(self.settings, self.batch)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[Row] = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from error
    if rows and is_golden(rows[0]):
        return [row_of_golden(row) for row in rows]
    missing = {"source", "model", "layers", "hidden", "gpu", "n_gpus", "global_batch"} - set(
        rows[0] if rows else ()
    )
    if missing:
        columns = ", ".join(sorted(missing))
        raise UserError(f"'{path}' has no published runs: it has no rows, or lacks the columns {columns}")
    stated = {_pipeline_of(row): row["vpp"] for row in rows if text(row, "vpp")}
    return [row if text(row, "vpp") else {**row, "vpp": stated.get(_pipeline_of(row), "")} for row in rows]


def _pipeline_of(row: Row) -> tuple[str, ...]:
    return tuple(text(row, name) for name in ("source", "model", "gpu", "tp", "pp"))


def run_of(row: Row) -> Run:
    """Return the run that a row describes. A UserError says what the row does not tell."""
    shape, cluster, practice = shape_of_row(row), cluster_of_row(row), practice_of(row)
    batch = integer(row, "global_batch")
    settings = _settings(row, practice)
    run = Run(
        row["source"],
        shape,
        cluster,
        practice,
        settings,
        batch,
        None,
        None,
        _overhead(row),
        "last rank" in row["source"],
    )
    if not text(row, "microbatch")[:1].isdigit():
        run = _with_fastest_microbatch(run)
    peak = measured(row, "peak_mem_GiB")
    return run._replace(seconds=_step_seconds(row, run), peak=peak * 2**30 if peak else None)


def _overhead(row: Row) -> float:
    """What nvidia-smi counts: the context, and buffers of messages. Or the workspaces that a row states."""
    return _CONTEXT if "BigScience" in row["source"] else (measured(row, "workspace_GiB") or 0.0) * 2**30


def _with_fastest_microbatch(run: Run) -> Run:
    """As the authors of the run would choose it."""
    each = max(1, run.batch // run.settings.data)
    options = [
        run._replace(settings=run.settings._replace(microbatches=each // size))
        for size in (1, 2, 4, 8)
        if each % size == 0
    ]
    predictions = [option.predict() for option in options]
    fitting = [index for index, each in enumerate(predictions) if each.fits] or [0]
    return options[min(fitting, key=lambda index: predictions[index].step_seconds)]


def _step_seconds(row: Row, run: Run) -> float | None:
    """The measured seconds of a step: published, or from a published rate of tokens or of operations."""
    published = measured(row, "step_time_s") or measured(row, "step_time_derived")
    if published:
        return published
    devices = integer(row, "n_gpus")
    if rate := measured(row, "tokens_per_s_per_gpu"):
        return run.batch * run.shape.sequence / (rate * devices)
    if rate := measured(row, "measured_tflops_per_gpu"):
        return _published_flops(run) / (rate * 1e12 * devices)
    return None


def _published_flops(run: Run) -> float:
    """Operations as papers count them; for GPT, Narayanan et al. 2021 (arXiv:2104.04473), equation 3, which
    counts those of full recomputation too."""
    shape = run.shape
    if shape.gated or shape.experts or shape.kv_heads != shape.heads:
        return run.batch * shape.step_flops(shape.sequence, shape.sequence)
    passes = 4 if run.settings.recompute == "full" else 3
    layers = 24 * passes * run.batch * shape.sequence * shape.layers * shape.hidden**2
    scores = shape.sequence / (6 * shape.hidden)
    return layers * (1 + scores + shape.vocab / (4 * passes * shape.layers * shape.hidden))


def _settings(row: Row, practice: Practice) -> Settings:
    tensor, pipeline = integer(row, "tp", 1), integer(row, "pp", 1)
    context, chunks = integer(row, "cp", 1), integer(row, "vpp", 1)
    data = integer(row, "dp", max(1, integer(row, "n_gpus") // (tensor * pipeline * context)))
    # '8 local' is the batch of a replica: its microbatches have one sequence.
    microbatch = 1 if "local" in text(row, "microbatch") else max(1, integer(row, "microbatch", 1))
    recompute = text(row, "recompute").lower()
    zero = integer(row, "zero_stage", 1)
    precision = (text(row, "precision") or ("fp8" if "MLPerf" in row["source"] else "bf16")).lower()
    narrow, frozen = _precision(precision), "lora" in f"{row['model']} {text(row, 'note')}".lower()
    return Settings(
        data,
        tensor,
        pipeline,
        context,
        integer(row, "ep", 1),
        expert_tensor=integer(row, "expert_tensor", 1),
        chunks=chunks,
        microbatches=max(1, -(-integer(row, "global_batch") // (microbatch * data))),
        zero=zero,
        schedule="interleaved" if chunks > 1 else "1f1b",
        sequence=tensor > 1 and (practice.flash or "sp" in recompute) and text(row, "sp") != "no",
        precision=narrow,
        recompute=next((word for word in ("full", "selective") if word in recompute), "none"),
        weight_bytes=1.0 if frozen and narrow in ("fp8", "fp4") else 2.0,
        gradient_bytes=_gradient_bytes(row, precision),
        message_bytes=2.0 if "pure" in precision or zero == 3 or "MLPerf" in row["source"] else 4.0,
        frozen=frozen,
    )


def _gradient_bytes(row: Row, precision: str) -> float:
    """Bytes of a gradient that a rank keeps; BLOOM's BF16 optimizer has sums in float32 beside gradients."""
    if "BigScience" in row["source"] and precision == "bf16":
        return 6.0
    return 2.0 if "pure" in precision or "MLPerf" in row["source"] else 4.0


def _precision(words: str) -> str:
    """'mxfp8' → 'fp8', 'amp_bf16/default' → 'bf16'."""
    if "rowwise" in words:  # its casts cost what its products gain
        return "bf16"
    names = {"fp4": "fp4", "fp8": "fp8", "float8": "fp8", "fp16": "fp16", "fp32": "fp32"}
    return next((name for word, name in names.items() if word in words), "bf16")
