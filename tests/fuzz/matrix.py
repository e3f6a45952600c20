"""Models of transformers and peft with every plan word, on 1, 2 and 4 ranks: docs/model-matrix.md.

python -m tests.fuzz --matrix --jobs 15 --json benchmarks/results/model-matrix.json
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from echelon.plan import Plan
from tests.fuzz.pool import POOL
from tests.fuzz.random_training import RandomTraining

_ALONE = {1: "", 2: "data=2", 4: "data=4"}
_SPLIT = {2: "data=2", 4: "data=4"}
_STAGES = {2: "pipeline=2 microbatches=4", 4: "pipeline=4 microbatches=4"}
_TENSOR = {2: "tensor=2", 4: "data=2 tensor=2"}
_CONTEXT = {2: "context=2", 4: "data=2 context=2"}

# Each word beside the smallest plan that it has a meaning in, by the number of ranks.
_PLANS: dict[str, dict[str, dict[int, str]]] = {
    "Replicas": {
        "data": _ALONE,
        "microbatches=2": _ALONE,
        **{f"zero={level}": _ALONE for level in (1, 2, 3)},
        "zero=3 shard=2": {4: "data=4"},
        "sync=parameter-server": _ALONE,
        "sync=async staleness=0": _SPLIT,
        "sync=async": _SPLIT,
        "debug=true": _ALONE,
    },
    "Layers among ranks": {
        "tensor": {2: "tensor=2", 4: "tensor=4"},
        "sequence=true": _TENSOR,
        "recompute=full checkpoints=split": _TENSOR,
        "context": {2: "context=2", 4: "context=4"},
        "attention=all-to-all": _CONTEXT,
        "expert=2": _SPLIT,
    },
    "Stages": {
        **{f"schedule={name}": _STAGES for name in ("naive", "gpipe", "1f1b", "zero-bubble")},
        **{f"schedule=pipedream{name}": _STAGES for name in ("", "-vertical", "-2bw")},
        "schedule=interleaved chunks=2": {
            2: "pipeline=2 microbatches=4",
            4: "data=2 pipeline=2 microbatches=2",
        },
        "replicas of a stage": {4: "pipeline=3-1 microbatches=3"},
        "pipeline=auto": {2: "microbatches=2", 4: "microbatches=2"},
    },
    "Memory": {
        **{f"recompute={name}": _ALONE for name in ("full", "selective", "sqrt", "budget:10000000")},
        "recompute=full contiguous=true": _ALONE,
        **{f"offload={name}": _ALONE for name in ("optimizer", "parameters", "activations")},
        "offload=optimizer delay=1": _ALONE,
        "update=backward": _ALONE,
        "update=last-backward": {ranks: f"{plan} microbatches=2" for ranks, plan in _ALONE.items()},
        **{f"compress={name}": _ALONE for name in ("gist", "gist-fp16", "gist-fp10", "gist-fp8")},
    },
    "Numbers and compiling": {
        "precision=bf16": _ALONE,
        "precision=bf16 gradients=same": _SPLIT,
        "precision=bf16 masters=false": _ALONE,
        "precision=fp16": _ALONE,
        "compile=true": {1: "", 2: "tensor=2"},
    },
}
# Options of `parallelize`, with data alone.
_OPTIONS: dict[str, dict[str, Any]] = {
    "a dict as batch": {"batch": "dict"},
    "loss=None": {"batch": "own"},
    "clip": {"clip": 0.1},
    "schedule": {"rates": "falling"},
    "deferred": {"deferred": True},
}
_UNEVEN = {"boundaries": "early"}


class Cell(NamedTuple):
    """A model, a word in its group, and a number of ranks."""

    model: str
    group: str
    word: str
    ranks: int


def cells() -> Iterator[tuple[Cell, RandomTraining]]:
    """Every cell of the table with its training."""
    for model in POOL:
        if POOL[model].package in ("transformers", "peft"):
            for group, words in _PLANS.items():
                for word, plans in words.items():
                    for ranks, plan in plans.items():
                        yield (
                            Cell(model, group, word, ranks),
                            _training(model, ranks, f"{plan} {_plan(word)}"),
                        )
            for word, options in _OPTIONS.items():
                for ranks, plan in _ALONE.items():
                    yield Cell(model, "Options", word, ranks), _training(model, ranks, plan, **options)
            for ranks, plan in _STAGES.items():
                yield Cell(model, "Options", "boundaries", ranks), _training(model, ranks, plan, **_UNEVEN)


def _plan(word: str) -> str:
    """What the word adds to a plan; some are names of the plan that they stand beside."""
    return word if "=" in word else ""


@cache
def _parse(plan: str) -> Plan:
    return Plan.parse(plan)


def _training(model: str, ranks: int, plan: str, **options: Any) -> RandomTraining:
    """Two sequences have no pair for a batch. Targets that do not count are in every batch."""
    chosen: dict[str, Any] = {"batch": "dict"} if model == "hf-t5" else {}
    targets = "all" if POOL[model].data == "images" else "some"
    parsed = _parse(plan.strip())
    return RandomTraining(
        parsed,
        workers=ranks if parsed.pipeline == "auto" else 1,
        model=model,
        layers=2,
        optimizer="adamw",
        samples=8,
        targets=targets,
        **chosen | options,
    )
