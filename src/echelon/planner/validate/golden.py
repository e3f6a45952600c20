"""Megatron-LM's own test runs: their command line arguments, as the columns of published runs.

The measured peak is that of the last rank: the last stage of the pipeline. The tables of these runs leave out
some arguments of a test's `model_config.yaml`. What is known of those, where there is no such column:

    --cross-entropy-loss-fusion   the test is named after it
    --transformer-impl            local in tests named gpt3_mcore_tp…, but with context parallelism; else
                                  Transformer Engine
    --moe-ffn-hidden-size         DeepSeek-V3's in proxies of that model, which have fewer layers and experts;
                                  so is their --multi-latent-attention
    --attention-backend           unfused in tests that run once, and in BERT's; none in tests that resume
                                  (their names say so) and in those of fused losses: Transformer Engine then
                                  fuses attention. Context parallelism has no other
    --num-virtual-stages-per-pipeline-rank       the 2 of `vp2`, where no layers per virtual stage are given
"""

import re

from echelon.errors import UserError
from echelon.planner.validate.columns import Row, integer, text
from echelon.planner.validate.shapes import usual_heads

_SOURCE = "Megatron-LM golden values, last rank"
_FOLDER = "tests/functional_tests/test_cases/"
_VOCABULARY = 50257  # GPT-2's, which most of the tests use
_BERT_VOCABULARY = 30522  # its WordPiece (arXiv:1810.04805)
_USUAL_DEVICE = "a100"  # the first of these tests ran there
_USUAL_DEVICES = 8  # where the recipe does not say
_TOP_K = 2
_DEEPSEEK_WIDTHS = (
    "{} dense/2048x{} experts top8+1 shared"  # DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2
)


def is_golden(row: Row) -> bool:
    return "peak_mem_bytes" in row


def row_of_golden(row: Row) -> dict[str, str]:
    """The same run in the columns of published runs."""
    tensor = integer(row, "tensor-model-parallel-size", 1)
    pipeline = integer(row, "pipeline-model-parallel-size", 1)
    context = integer(row, "context-parallel-size", 1)
    layers = integer(row, "num-layers")
    expert = integer(row, "expert-model-parallel-size", 1)
    expert_ranks = expert * integer(row, "expert-tensor-parallel-size", tensor)
    devices = max(integer(row, "n_gpus", _USUAL_DEVICES), pipeline * max(tensor * context, expert_ranks))
    hidden = integer(row, "hidden-size")
    heads = text(row, "num-attention-heads") or str(usual_heads(hidden))
    is_sharded = text(row, "use-distributed-optimizer") == "True"
    width = integer(row, "ffn-hidden-size", 4 * hidden)
    name = text(row, "file").removeprefix(_FOLDER)
    is_deepseek = "deepseekv3" in name
    return {
        "source": _SOURCE,
        "model": f"{'gated llama ' if text(row, 'swiglu') == 'True' else ''}{name}",
        "layers": str(layers),
        "hidden": str(hidden),
        "heads": heads,
        "kv_heads": "MLA" if is_deepseek else text(row, "num-query-groups") or heads,
        "ffn": _widths(row, width, is_deepseek),
        "vocab": str(_BERT_VOCABULARY if _is_bert(name) else _VOCABULARY),
        "seq": text(row, "seq-length"),
        "gpu": text(row, "gpu") or _USUAL_DEVICE,
        "n_gpus": str(devices),
        "tp": str(tensor),
        "pp": str(pipeline),
        "vpp": str(_virtual_stages(row, name, layers // pipeline)),
        "cp": str(context),
        "ep": text(row, "expert-model-parallel-size"),
        "expert_tensor": text(row, "expert-tensor-parallel-size") or str(tensor),
        "sp": "yes" if text(row, "sequence-parallel") == "True" else "no",
        "zero_stage": "3" if text(row, "data-parallel-sharding-strategy") else "1" if is_sharded else "0",
        "recompute": text(row, "recompute-granularity"),
        "global_batch": text(row, "global-batch-size"),
        "microbatch": text(row, "micro-batch-size"),
        "precision": "fp8" if text(row, "fp8-format") else "fp16" if text(row, "fp16") else "bf16",
        "step_time_s": text(row, "median_step_s"),
        "peak_mem_GiB": _gibibytes(text(row, "peak_mem_bytes")),
        "workspace_GiB": str(_workspaces(row, name)),
        "loss": "fused" if _has_fused_loss(row, name) else "",
        "host": "one node" if name.split("/")[1].endswith("_1node") else "",
        "attention": "flash" if _has_fused_attention(row, name) else "unfused",
        "note": name,
    }


def _widths(row: Row, width: int, is_deepseek: bool) -> str:
    experts = integer(row, "num-experts", 0)
    if is_deepseek:
        return _DEEPSEEK_WIDTHS.format(width, experts)
    return f"{width}x{experts} experts top{min(_TOP_K, experts)}" if experts else str(width)


def _is_bert(name: str) -> bool:
    return name.startswith("bert")


def _has_fused_loss(row: Row, name: str) -> bool:
    stated = text(row, "cross-entropy-loss-fusion")
    return stated == "True" if stated else "cross_entropy_loss_fusion" in name


def _has_transformer_engine(row: Row, name: str) -> bool:
    if stated := text(row, "transformer-impl"):
        return stated != "local"
    return "gpt3_mcore_tp" not in name or integer(row, "context-parallel-size", 1) > 1


def _has_fused_attention(row: Row, name: str) -> bool:
    if stated := text(row, "attention-backend"):
        return stated != "unfused"
    if integer(row, "context-parallel-size", 1) > 1:
        return True
    is_free = "resume" in name or _has_fused_loss(row, name)
    return is_free and _has_transformer_engine(row, name) and not _is_bert(name)


def _virtual_stages(row: Row, name: str, layers: int) -> int:
    """Of each rank, which has so many layers."""
    if each := integer(row, "num-layers-per-virtual-pipeline-stage", 0):
        return layers // each
    named = re.search(r"_vp(\d+)_", name)
    return integer(row, "num-virtual-stages-per-pipeline-rank", int(named[1]) if named else 1)


def _workspaces(row: Row, name: str) -> float:
    """Gibibytes that libraries allocate for products: cuBLAS with `CUBLAS_WORKSPACE_CONFIG=:4096:8`, as
    deterministic tests have it, and Transformer Engine, which takes more from Hopper on."""
    engine = (
        (4 if text(row, "gpu") in ("", _USUAL_DEVICE) else 32) if _has_transformer_engine(row, name) else 0
    )
    return (32 + engine) / 1024


def _gibibytes(digits: str) -> str:
    if digits and not digits.replace(".", "").isdigit():
        raise UserError(f"peak_mem_bytes={digits!r}: must be a number")
    return str(float(digits) / 2**30) if digits else ""
