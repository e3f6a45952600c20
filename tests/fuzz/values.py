"""What each field of a random training may be, the simplest first, and which values go together.

A rule here repeats a rule of the library.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from echelon.plan import ASYNCHRONOUS_SCHEDULES, AUTO, SCHEDULES, Plan
from echelon.plan.plan import broken_rules, draft
from tests.fuzz.model_rules import CONTRACT_MODELS, LOW_PRECISIONS, POOL_LAYERS, Rule, Values, model_rules
from tests.fuzz.pool import POOL
from tests.fuzz.random_training import ORDER_FILE

MOST_RANKS = 8
MOST_COMPILING = 4  # more would take minutes
MOST_OF_POOL = 4
PLAN_FIELDS = tuple(Plan.__dataclass_fields__)
INFINITE = float("inf")
_NAIVE_OR_FILE = ("naive", ORDER_FILE)

_PIPELINES = (1, 2, 3, 4, (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (2, 1, 1), (1, 2, 1), AUTO)
# The values of each field, in the order of drawing; a value that is listed twice is drawn twice as often.
_BUDGETS = tuple(f"budget:{thousands}000" for thousands in (100, 300, 1000, 10000))
_CANDIDATES: dict[str, Sequence[Any]] = {
    "model": (*("gpt",) * 5, *("llama",) * 5, *("experts",) * 4, *CONTRACT_MODELS, *tuple(POOL) * 3),
    "bold": (False, False, False, True),
    "pipeline": (*_PIPELINES, 1, 1, 2, 2, 3),
    "workers": (1, 2, 3, 4),
    "schedule": ("1f1b", *(name for name in SCHEDULES if name != "1f1b"), ORDER_FILE),
    "sync": ("all-reduce", "all-reduce", "all-reduce", "parameter-server", "async"),
    "data": (1, 2, 3, 4, 6, 8, 2),
    "tensor": (1, 2, 4, 2),
    "context": (1, 2, 3, 4, 2),
    "attention": ("ring", "all-to-all"),
    "expert": (1, 2, 4, 2),
    "staleness": (INFINITE, 0, 1, 2, 5),
    "zero": (0, 1, 2, 3),
    "shard": (0, 2, 3, 4, 2),
    "chunks": (1, 2, 3),
    "microbatches": (1, 2, 3, 4, 5, 6, 7, 8),
    "sequence": (False, True),
    "compile": (*(False,) * 79, True),  # it takes seconds on every rank
    "precision": (
        "fp32",
        "fp64",
        "fp32",
        "fp64",
        "bf16",
        "fp16",
    ),  # those of LOW_PRECISIONS are compared in themselves, others in fp64
    "gradients": ("fp32", "same"),
    "recompute": ("none", "full", "selective", "sqrt", *_BUDGETS),
    "checkpoints": ("whole", "split"),
    "contiguous": (False, True),
    "update": ("step", "backward", "last-backward"),
    "masters": (True, False),
    "offload": (
        (),
        ("optimizer",),
        ("parameters",),
        ("activations",),
        ("optimizer", "activations"),
        ("optimizer", "parameters"),
        ("optimizer", "parameters", "activations"),
    ),
    "delay": (0, 1),
    # Below float32, `verify` compares with one device that does not round what it saves.
    "compress": ("none", "none", "gist", "gist-fp16", "gist-fp10", "gist-fp8"),
    "debug": (*(False,) * 9, True),  # ranks compare every operation
    "graphs": ("false", "auto"),
    "layers": (1, 2, 3, 4, 5, 6),
    "heads": (2, 1, 4),
    "kv_heads": (0, 1, 2),
    "vocab": (16, 17),
    "tokens": (8, 12, 7, 11),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "optimizer": ("sgd", "adam", "adamw", "adafactor", "sm3", "muon"),
    "decay": ("none", "all", "matrices"),
    "clip": (0.0, 0.1, 1.0),
    "targets": ("all", "some", "few"),
    "batch": ("pair", "dict", "own"),
    "steps": (3, 4, 5),
    "prefetch": (1, 0, 2),
    "smallest_unit": (0, 4096),
    "resident_bytes": (0, 3000, 10**9),
    "rates": ("constant", "falling"),
    "deferred": (False, False, True),
    "boundaries": ("even", "early"),
    "seed": (0, 1, 2, 3),
}
FIELDS = (*_CANDIDATES, "samples")


def candidates(field: str, values: Values) -> list[Any]:
    """The values of a field that run, those before first that make a smaller training."""
    if field == "samples":
        return _samples(values)
    return list(_CANDIDATES[field])


def _samples(values: Values) -> list[int]:
    """An evenly divisible number, one less, one more, one per replica, fewer than replicas, and many."""
    replicas, shares = values["data"], values["data"] * values["microbatches"]
    numbers = (shares, shares + 1, shares - 1, replicas, replicas - 1, 2 * shares + 1, 1, 11)
    return [number for number in numbers if 0 < number <= 24] + [replicas * values["workers"]]


def fits(values: Values, field: str) -> bool:
    """Whether the value of a field breaks no rule with others that are chosen; some rules wait for more."""
    own = (rule(values) for names, rule in _RULES if field in names and all(name in values for name in names))
    most = MOST_COMPILING if values.get("compile") else MOST_RANKS
    most = min(most, MOST_OF_POOL) if values.get("model") in POOL else most
    if not all(own) or _ranks(values) > most:
        return False
    partial = draft({name: value for name, value in values.items() if name in PLAN_FIELDS})
    unknown = [name for name in PLAN_FIELDS if name not in values]
    return field not in PLAN_FIELDS or not any(broken_rules(partial, unknown))


def _ranks(values: Values) -> int:
    """How many ranks the fields that are chosen so far take."""
    product = values.get("workers", 1)
    for axis in ("data", "tensor", "context"):
        product *= values.get(axis, 1)
    pipeline = values.get("pipeline", 1)
    if pipeline == AUTO:
        return product  # type: ignore[no-any-return]
    return product * (sum(pipeline) if isinstance(pipeline, tuple) else pipeline)  # type: ignore[no-any-return]


def has_replicas(values: Values) -> bool:
    """Whether some stage has, or may be found to have, several ranks within a replica."""
    return isinstance(values["pipeline"], tuple) or values["pipeline"] == AUTO


def _meets_in_microbatches(values: Values) -> bool:
    """Whether every replica needs a sample."""
    in_stages = values["pipeline"] != 1 or values["schedule"] in (*ASYNCHRONOUS_SCHEDULES, ORDER_FILE)
    has_batch_norm = values["model"] in ("resnet", "cnn-norm")
    has_others_talk = has_batch_norm or values["expert"] > 1
    return in_stages or values["zero"] >= 2 or values["sync"] == "async" or has_others_talk


def _finds_no_replicas(values: Values) -> bool:
    """Whether measuring finds one stage for each worker."""
    straight = values["schedule"] in ASYNCHRONOUS_SCHEDULES or values["zero"] == 3 or values["expert"] > 1
    return values["pipeline"] == AUTO and straight


def _most_stages(values: Values) -> int:
    """With the embedding and the head."""
    return max(POOL_LAYERS if values["model"] in POOL else _CANDIDATES["layers"]) + 2


def _stages(values: Values) -> int:
    pipeline = values["pipeline"]
    if pipeline == AUTO:
        return 1
    return len(pipeline) if isinstance(pipeline, tuple) else pipeline  # type: ignore[no-any-return]


def _within_budget(values: Values) -> bool:
    """Whether a budget is surely enough, with the smallest values of what is not drawn yet. A layer saves
    less than 80 times its input; where a backward pass is in two halves, nothing is gained by running it
    again."""
    if not values["recompute"].startswith("budget:") or values["model"] in POOL:
        return True
    samples = -(-values["samples"] // values["data"]) if "samples" in values else values["workers"]
    inputs = samples * values.get("tokens", min(_CANDIDATES["tokens"])) * 8 * 8  # a width of 8, in float64
    layers = values.get("layers", 1) + 2
    factor = 80 * layers if values.get("schedule") in ("zero-bubble", ORDER_FILE) else 80 + layers
    return bool(inputs * factor <= int(values["recompute"].removeprefix("budget:")))


def _rules() -> Iterator[tuple[tuple[str, ...], Rule]]:
    """The fields that a rule reads, and whether they go together."""
    yield from model_rules(_CANDIDATES)
    yield (
        ("bold", "model", "recompute"),
        lambda v: v["bold"] or v["model"] not in POOL or v["recompute"] not in _BUDGETS[:-1],
    )
    yield ("model", "recompute", "workers"), _within_budget
    for drawn in ((), ("layers",), ("layers", "tokens"), ("layers", "tokens", "samples", "data")):
        yield ("model", "recompute", "schedule", "workers", *drawn), _within_budget
    # A file may split backward passes in two.
    yield ("compile", "schedule"), lambda v: not (v["compile"] and v["schedule"] == ORDER_FILE)
    yield (
        ("precision", "compress"),
        lambda v: v["precision"] not in LOW_PRECISIONS or v["compress"] in ("none", "gist"),
    )
    yield ("tensor", "sequence"), lambda v: v["tensor"] > 1 or not v["sequence"]
    # Stages.
    yield ("pipeline", "workers"), lambda v: v["pipeline"] == AUTO or v["workers"] == 1
    yield ("pipeline", "schedule"), lambda v: v["schedule"] != "interleaved" or v["pipeline"] != 1
    yield ("model", "chunks"), lambda v: v["chunks"] == 1 or 2 * v["chunks"] <= _most_stages(v)
    yield ("model", "pipeline", "chunks"), lambda v: _stages(v) * v["chunks"] <= _most_stages(v)
    yield (
        ("model", "pipeline", "schedule"),
        lambda v: v["schedule"] != "interleaved" or 2 * _stages(v) <= _most_stages(v),
    )
    yield ("pipeline", "chunks", "layers"), lambda v: _stages(v) * v["chunks"] <= v["layers"] + 2
    yield (
        ("pipeline", "schedule", "layers"),
        lambda v: v["schedule"] != "interleaved" or 2 * _stages(v) <= v["layers"] + 2,
    )
    yield ("schedule", "chunks"), lambda v: v["schedule"] != ORDER_FILE or v["chunks"] == 1
    yield ("schedule", "clip"), lambda v: v["schedule"] not in ASYNCHRONOUS_SCHEDULES or v["clip"] == 0
    # The norm is known when all gradients were there.
    yield ("update", "clip"), lambda v: v["update"] == "step" or v["clip"] == 0
    # Whole parameters are put together on the device.
    yield (
        ("offload", "zero", "tensor", "expert", "optimizer"),
        lambda v: (
            "optimizer" not in v["offload"]
            or v["optimizer"] != "muon"
            or (v["zero"] == 0 and v["tensor"] == 1 and v["expert"] == 1)
        ),
    )
    # Interleaved stages need several microbatches.
    yield ("update", "schedule"), lambda v: v["update"] != "backward" or v["schedule"] != "interleaved"
    # Weights in the first and the last stage.
    yield (
        ("schedule", "pipeline", "tied"),
        lambda v: not (v["tied"] and v["schedule"] in ASYNCHRONOUS_SCHEDULES and v["pipeline"] != 1),
    )
    yield (
        ("zero", "pipeline", "tied"),
        lambda v: not (v["tied"] and v["zero"] and has_replicas(v) and v["pipeline"] != (2, 2)),
    )
    # What measuring may find: replicas of a stage, or no stages at all.
    yield (
        ("pipeline", "zero", "schedule"),
        lambda v: v["pipeline"] != AUTO or v["zero"] < 2 or v["schedule"] not in _NAIVE_OR_FILE,
    )
    yield (
        ("pipeline", "schedule", "microbatches", "workers"),
        lambda v: (
            v["pipeline"] != AUTO or v["schedule"] != "pipedream-2bw" or v["microbatches"] >= v["workers"]
        ),
    )
    yield (
        ("pipeline", "schedule", "zero", "expert", "workers", "layers"),
        lambda v: not _finds_no_replicas(v) or v["workers"] <= v["layers"] + 2,
    )
    # Boundaries are those of stages that the plan counts.
    yield (
        ("boundaries", "pipeline", "schedule"),
        lambda v: (
            v["boundaries"] == "even"
            or (v["pipeline"] not in (1, AUTO) and v["schedule"] not in ("interleaved", ORDER_FILE))
        ),
    )
    # Batches.
    yield (
        ("samples", "model", "data", "expert", "workers", "pipeline", "schedule", "zero", "sync"),
        lambda v: not _meets_in_microbatches(v) or v["samples"] >= v["data"] * v["workers"],
    )
    yield (
        ("sync", "staleness", "dropout", "data", "samples"),
        lambda v: (
            not (v["sync"] == "async" and v["staleness"] == 0 and v["dropout"])
            or v["samples"] % v["data"] == 0
        ),
    )
    yield ("sync", "targets"), lambda v: v["sync"] != "async" or v["targets"] != "few"
    yield (
        ("zero", "offload", "prefetch"),
        lambda v: v["zero"] == 3 or "parameters" in v["offload"] or v["prefetch"] == 1,
    )
    yield ("offload", "resident_bytes"), lambda v: "parameters" in v["offload"] or v["resident_bytes"] == 0


_RULES = tuple(_rules())
