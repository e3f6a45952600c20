"""Shapes of echelon's own models: from a `ModelConfig`, or the name of a preset."""

from echelon.errors import UserError, did_you_mean
from echelon.models.config import ModelConfig
from echelon.planner.shape.shape import Experts, LatentAttention, ModelShape


def shape_of(config: ModelConfig, name: str = "model") -> ModelShape:
    """Return the shape of a model of echelon: shape_of(preset("llama3-8b")).num_parameters."""
    is_gpt = config.family == "gpt"
    return ModelShape(
        name,
        config.layers,
        config.width,
        config.heads,
        config.vocab,
        config.sequence,
        kv_heads=config.num_kv_heads,
        ffn=config.ffn_width,
        head_width=config.head_dim,
        gated=not is_gpt,
        tied=config.tied,
        bias=config.bias,
        qk_norm=config.qk_norm,
        norm_vectors=2 if is_gpt else 1,
        learned_positions=config.sequence if is_gpt else 0,
        dropout=config.dropout > 0,
        experts=_experts_of(config),
    )


def _experts_of(config: ModelConfig) -> Experts | None:
    if (experts := config.experts) is None:
        return None
    return Experts(
        experts.num_experts,
        experts.top_k,
        experts.hidden,
        experts.shared,
        experts.first_dense,
        gate_rows=experts.num_gate_rows + experts.shared_gate,
        has_loss=any((experts.balance, experts.importance, experts.load, experts.z_loss)),
    )


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name,
        layers,
        hidden,
        heads,
        51200,
        2048,
        kv_heads=heads,
        ffn=4 * hidden,
        head_width=hidden // heads,
        tied=True,
        bias=True,
        norm_vectors=2,
        learned_positions=2048,
        dropout=True,
    )


# Models that echelon does not build, by their published sizes: Narayanan et al. 2021 (arXiv:2104.04473),
# table 1, and DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2.
PUBLISHED = {
    "gpt-530b": _gpt("gpt-530b", 105, 20480, 128),
    "gpt-1t": _gpt("gpt-1t", 128, 25600, 160),
    "deepseek-v3": ModelShape(
        "deepseek-v3",
        61,
        7168,
        128,
        129280,
        4096,
        kv_heads=128,
        ffn=18432,
        head_width=128,
        gated=True,
        experts=Experts(256, 8, hidden=2048, shared=2048, first_dense=3),
        latent=LatentAttention(query_rank=1536, kv_rank=512, rope=64, nope=128, value=128),
    ),
}


def preset_shape(name: str) -> ModelShape:
    """Return the shape of a preset: preset_shape("llama3-405b")."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    from echelon.models.build import preset, presets  # a second of torch

    names = (*presets(), *PUBLISHED)
    if name not in names:
        raise UserError(f"'{name}' is not a model{did_you_mean(name, names)}")
    return shape_of(preset(name), name)
