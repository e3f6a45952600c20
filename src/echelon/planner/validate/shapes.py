"""The shape of a published run's model: from the columns of its row, and its family by name."""

import re

from echelon.planner.shape.shape import Experts, LatentAttention, ModelShape
from echelon.planner.validate.columns import Row, integer, text

# What the columns have no place for, by the models' own papers and configuration files.
_DEEPSEEK_LATENT = LatentAttention(query_rank=1536, kv_rank=512, rope=64, nope=128, value=128)  # Kimi K2 too
_FIRST_DENSE = {"deepseekv3": 3, "kimi": 1}
_HEAD_WIDTHS = {"qwen3": 128, "gpt oss": 64}
# BigScience's chronicle states the heads of its model of 200 billion parameters ("NLAYERS=80, NHIDDEN=14400,
# NHEADS=96"); the others of that width differ from it by their layers.
_HEADS = {"h14400 (bloom": 96}
_GATED = ("llama", "mixtral", "mistral", "qwen", "deepseek", "kimi", "gpt oss", "gemma", "olmo", "yi-")
_NO_DROPOUT = ("mpt", "nemotron")
_EXPERTS = re.compile(r"(?:(\d+) dense/)?(\d+)x(\d+) experts top(\d+)(?:\+(\d+) shared)?")
_USUAL_HEAD = 128


def shape_of_row(row: Row) -> ModelShape:
    """Return the shape of a row's model. A UserError says what the row does not state."""
    name = row["model"]
    key = name.lower()
    hidden, layers, sequence = (integer(row, column) for column in ("hidden", "layers", "seq"))
    heads = integer(row, "heads", _by_name(_HEADS, key, 0) or usual_heads(hidden))
    gated = any(word in key for word in _GATED)
    is_gpt = not gated and "nemotron" not in key
    return ModelShape(
        name,
        layers,
        hidden,
        heads,
        _padded(integer(row, "vocab", 51200), 128 * integer(row, "tp", 1)),
        sequence,
        kv_heads=integer(row, "kv_heads", heads),
        ffn=_dense_width(row, hidden),
        head_width=_by_name(_HEAD_WIDTHS, key, hidden // heads),
        gated=gated,
        tied=is_gpt,
        bias=is_gpt,
        norm_vectors=1 if gated else 2,
        learned_positions=sequence if is_gpt else 0,
        dropout=not gated and not any(word in key for word in _NO_DROPOUT),
        experts=_experts(row, _by_name(_FIRST_DENSE, key, 0)),
        latent=_DEEPSEEK_LATENT if "MLA" in text(row, "kv_heads") else None,
    )


def usual_heads(hidden: int) -> int:
    """The number of heads that divides the hidden width into heads nearest to 128 wide."""
    divisors = (heads for heads in range(1, hidden + 1) if hidden % heads == 0)
    return min(divisors, key=lambda heads: abs(hidden / heads - _USUAL_HEAD))


def _by_name(table: dict[str, int], key: str, default: int) -> int:
    return next((value for word, value in table.items() if word in key), default)


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _dense_width(row: Row, hidden: int) -> int:
    match = _EXPERTS.search(text(row, "ffn"))
    if match:
        return int(match[1] or match[2])
    return integer(row, "ffn", 4 * hidden)


def _experts(row: Row, first_dense: int) -> Experts | None:
    """'18432 dense/2048x256 experts top8+1 shared'."""
    match = _EXPERTS.search(text(row, "ffn"))
    if not match:
        return None
    _, width, number, top_k, shared = (int(part or 0) for part in match.groups())
    return Experts(number, top_k, width, shared * width, first_dense)
