"""Megatron-LM's own test runs: their command line arguments, as the columns of published runs.

The measured peak is that of the last rank: the last stage of the pipeline.
"""

from echelon.errors import UserError
from echelon.planner.validate.columns import Row, integer, text
from echelon.planner.validate.shapes import usual_heads

_SOURCE = "Megatron-LM golden values, last rank"
_FOLDER = "tests/functional_tests/test_cases/"
_VOCABULARY = 50257  # GPT-2's, which most of the tests use
_USUAL_DEVICE = "a100"  # the first of these tests ran there
_USUAL_DEVICES = 8  # where the recipe does not say
_TOP_K = 2


def is_golden(row: Row) -> bool:
    return "peak_mem_bytes" in row


def row_of_golden(row: Row) -> dict[str, str]:
    """The same run in the columns of published runs."""
    tensor = integer(row, "tensor-model-parallel-size", 1)
    pipeline = integer(row, "pipeline-model-parallel-size", 1)
    context = integer(row, "context-parallel-size", 1)
    layers = integer(row, "num-layers")
    devices = max(integer(row, "n_gpus", _USUAL_DEVICES), tensor * pipeline * context)
    virtual = integer(row, "num-layers-per-virtual-pipeline-stage", 0)
    hidden = integer(row, "hidden-size")
    heads = text(row, "num-attention-heads") or str(usual_heads(hidden))
    is_sharded = text(row, "use-distributed-optimizer") == "True"
    width = integer(row, "ffn-hidden-size", 4 * hidden)
    experts = text(row, "num-experts")
    name = text(row, "file").removeprefix(_FOLDER)
    return {
        "source": _SOURCE,
        "model": f"{'gated llama ' if text(row, 'swiglu') == 'True' else ''}{name}",
        "layers": str(layers),
        "hidden": str(hidden),
        "heads": heads,
        "kv_heads": text(row, "num-query-groups") or heads,
        "ffn": f"{width}x{experts} experts top{min(_TOP_K, int(experts))}" if experts else str(width),
        "vocab": str(_VOCABULARY),
        "seq": text(row, "seq-length"),
        "gpu": text(row, "gpu") or _USUAL_DEVICE,
        "n_gpus": str(devices),
        "tp": str(tensor),
        "pp": str(pipeline),
        "vpp": str(layers // (pipeline * virtual)) if virtual else "1",
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
        "attention": "flash" if _has_fused_attention(row) else "unfused",
        "note": name,
    }


def _has_fused_attention(row: Row) -> bool:
    """Whether a run used fused attention, which no argument says.

    The tests are deterministic, for which fused attention was turned off; context parallelism has no other.
    """
    return integer(row, "context-parallel-size", 1) > 1


def _gibibytes(digits: str) -> str:
    if digits and not digits.replace(".", "").isdigit():
        raise UserError(f"peak_mem_bytes={digits!r}: must be a number")
    return str(float(digits) / 2**30) if digits else ""
