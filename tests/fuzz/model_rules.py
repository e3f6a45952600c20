"""Which values of a random training go with its model.

Ours take every plan. A model of the pool may have any value that its words know, and any at all in a training
that is `bold`: there the library must refuse what it cannot do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from echelon.parallel.context import head_errors
from echelon.plan import ASYNCHRONOUS_SCHEDULES
from tests.fuzz.pool import COUNTED_PADDING, DROPOUT, IMAGES, LAYERS, POOL, SEQUENCE_PAIRS, SEQUENCES, TENSOR
from tests.fuzz.random_training import ORDER_FILE

Values = Mapping[str, Any]
Rule = Callable[[Values], bool]

TRANSFORMERS = ("gpt", "llama", "experts")  # the last: a Llama with mixtures of experts
CONTRACT_MODELS = ("resnet", "lstm", "encoder", "twice")
LOW_PRECISIONS = ("bf16", "fp16")
NUM_EXPERTS = 4
OF_TOKENS = (
    *(*TRANSFORMERS, "lstm", "encoder"),
    *(name for name, model in POOL.items() if model.data != IMAGES),
)
POOL_LAYERS = (1, 2, 3)
_HEADS = 4  # of every model of the pool
_WHOLE_HEADS = ("hf-gpt2", "hf-bert", "hf-t5", "hf-vit", "timm-vit")  # others have two for keys and values
_GATED = ("experts", "hf-mixtral")
MICROBATCHES = "microbatches"  # batch norms want the whole batch


def model_rules(candidates: Mapping[str, Sequence[Any]]) -> Iterator[tuple[tuple[str, ...], Rule]]:
    """The fields that a rule reads, and whether they go together."""
    yield ("bold", "model"), lambda v: not v["bold"] or v["model"] in POOL
    for (_, field), rule in _words(candidates):  # with what is not drawn yet, and again with all
        yield from (((*names, "model", field), rule) for names in ((), ("bold",)))
    # What tensor ranks hold alike, they divide.
    yield ("tensor", "checkpoints"), lambda v: v["tensor"] > 1 or v["checkpoints"] == "whole"
    yield ("model", "dropout"), lambda v: not v["dropout"] or _may_drop(v)
    yield from _sizes(candidates)
    yield from _gates()
    # Statistics of a batch are far apart after rounding.
    yield ("model", "precision"), lambda v: v["model"] != "cnn-norm" or v["precision"] not in LOW_PRECISIONS
    # Workers have statistics of their own samples, and a replay those of one model.
    yield (
        ("model", "sync", "staleness"),
        lambda v: v["model"] not in ("cnn-norm", "resnet") or v["sync"] != "async" or v["staleness"] == 0,
    )
    yield ("model", "targets"), lambda v: v["model"] in OF_TOKENS or v["targets"] == "all"
    yield ("model", "batch"), _takes_batch
    # Replays weigh a model's own mean by samples, as if all had as many targets.
    yield (
        ("batch", "schedule", "sync", "staleness", "targets"),
        lambda v: v["batch"] != "own" or v["targets"] == "all" or not _is_replayed(v),
    )
    yield (
        ("batch", "schedule", "sync", "staleness", "seed"),
        lambda v: v["batch"] != "own" or _counts_padding(v["seed"]) or not _is_replayed(v),
    )
    # Any replica's batch may have padding whose labels count, and `context` takes none.
    yield (
        ("batch", "context", "seed"),
        lambda v: v["batch"] == "pair" or v["context"] == 1 or v["seed"] != COUNTED_PADDING,
    )
    # Beside a model's own loss `verify` computes in float64; frequencies of a deferred one stay in float32.
    yield ("deferred", "batch"), lambda v: not v["deferred"] or v["batch"] != "own"
    # `verify` starts from weights that the type can hold, and a deferred model has none to round.
    yield ("deferred", "precision"), lambda v: not v["deferred"] or v["precision"] not in LOW_PRECISIONS


def takes(values: Values, word: str) -> bool:
    """Whether the model knows what a plan word needs, or the training is bold."""
    model = values["model"]
    if word == MICROBATCHES:
        return model != "cnn-norm" or _is_bold(values)
    return _is_bold(values) or (word in POOL[model].words if model in POOL else model in TRANSFORMERS)


def _words(candidates: Mapping[str, Sequence[Any]]) -> Iterator[tuple[tuple[str, ...], Rule]]:
    for field in ("chunks", "workers", "pipeline", "recompute", "boundaries"):
        simplest = candidates[field][0]
        yield ("model", field), lambda v, f=field, plain=simplest: v[f] == plain or takes(v, LAYERS)
    yield (
        ("model", "schedule"),
        lambda v: v["schedule"] not in ("interleaved", ORDER_FILE) or takes(v, LAYERS),
    )
    yield ("model", "offload"), lambda v: "activations" not in v["offload"] or takes(v, LAYERS)
    yield ("model", "tensor"), lambda v: v["tensor"] == 1 or takes(v, TENSOR)
    yield ("model", "checkpoints"), lambda v: v["checkpoints"] == "whole" or takes(v, TENSOR)
    yield ("model", "context"), lambda v: v["context"] == 1 or takes(v, SEQUENCES)
    yield ("model", "sequence"), lambda v: not v["sequence"] or takes(v, SEQUENCES)
    yield ("model", "microbatches"), lambda v: v["microbatches"] == 1 or takes(v, MICROBATCHES)
    yield ("model", "expert"), lambda v: v["expert"] == 1 or v["model"] == "experts" or _is_bold(v)


def _is_bold(values: Values) -> bool:
    """Or may be: it is not drawn yet."""
    return values["model"] in POOL and values.get("bold", True)


def _may_drop(values: Values) -> bool:
    model = values["model"]
    return DROPOUT in POOL[model].words if model in POOL else model in TRANSFORMERS


def _sizes(candidates: Mapping[str, Sequence[Any]]) -> Iterator[tuple[tuple[str, ...], Rule]]:
    """Those of our own models are drawn. Some must be divisible by the degrees of axes."""
    for field in ("heads", "vocab", "tokens", "tied"):
        simplest = candidates[field][0]
        yield ("model", field), lambda v, f=field, plain=simplest: v["model"] in TRANSFORMERS or v[f] == plain
    yield ("model", "layers"), lambda v: v["model"] in TRANSFORMERS or v["layers"] in _layers_of(v["model"])
    yield ("model", "kv_heads"), lambda v: v["model"] in ("llama", "experts") or v["kv_heads"] == 0
    yield ("kv_heads", "heads"), lambda v: v["kv_heads"] == 0 or v["heads"] % v["kv_heads"] == 0
    yield ("tensor", "heads"), lambda v: v["model"] in POOL or v["heads"] % v["tensor"] == 0
    yield (
        ("bold", "model", "tensor"),
        lambda v: v["bold"] or v["model"] not in POOL or _kv_heads(v["model"]) % v["tensor"] == 0,
    )
    yield ("tensor", "kv_heads"), lambda v: v["kv_heads"] % v["tensor"] == 0
    most = max(candidates["heads"])
    yield ("attention", "context", "tensor"), lambda v: not _head_errors({**v, "heads": most})
    yield ("attention", "context", "tensor", "heads"), lambda v: not _head_errors(v)
    yield ("attention", "context", "tensor", "heads", "kv_heads"), lambda v: not _head_errors(v)


def _layers_of(model: str) -> Sequence[int]:
    return POOL_LAYERS if model in POOL else (1,)


def _kv_heads(model: str) -> int:
    """Of a model of the pool."""
    return _HEADS if model in _WHOLE_HEADS else _HEADS // 2


def _head_errors(values: Values) -> list[str]:
    """Why ranks cannot each take a part of the heads."""
    heads, kv_heads = values["heads"], values.get("kv_heads") or values["heads"]
    if values["model"] in POOL:
        heads, kv_heads = _HEADS, _kv_heads(values["model"])
    if values["attention"] == "ring" or values["bold"]:
        return []
    return head_errors(heads, kv_heads, values["context"], values["tensor"])


def _gates() -> Iterator[tuple[tuple[str, ...], Rule]]:
    """Which experts a token has may change with the last bit."""
    yield ("model", "precision"), lambda v: v["model"] not in _GATED or v["precision"] not in LOW_PRECISIONS
    yield ("model", "compress"), lambda v: v["model"] not in _GATED or v["compress"] in ("none", "gist")
    yield ("model", "masters"), lambda v: v["model"] not in (*_GATED, "cnn-norm") or v["masters"]
    yield ("model", "compile"), lambda v: not v["compile"] or v["model"] not in (*_GATED, *CONTRACT_MODELS)


def _takes_batch(values: Values) -> bool:
    """transformers' models take dicts and have losses; two sequences are no pair of inputs and targets."""
    model = POOL.get(values["model"])
    if model is None or model.package not in ("transformers", "peft"):
        return bool(values["batch"] == "pair")
    return values["batch"] != "pair" or model.data != SEQUENCE_PAIRS


def _counts_padding(seed: int) -> bool:
    """Whether every label of a batch counts that `targets` leaves."""
    return seed % 2 == 0 or seed == COUNTED_PADDING


def _is_replayed(values: Values) -> bool:
    is_stale = values["sync"] == "async" and values["staleness"] > 0
    return is_stale or values["schedule"] in ASYNCHRONOUS_SCHEDULES
