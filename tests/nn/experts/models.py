"""Small language models with experts, for tests."""

from collections.abc import Callable

from torch import nn

from echelon.models import ModelConfig, build
from echelon.nn.experts import Experts, Gate, MixtureOfExperts, SoftmaxGate

WIDTH, EXPERTS, VOCAB, SEQUENCE = 16, 4, 32, 8


def softmax_gate() -> Gate:
    return SoftmaxGate(WIDTH, EXPERTS, 2, balance=0.1)


def make_model(make_gate: Callable[[], Gate] = softmax_gate, layers: int = 2) -> nn.Module:
    """A Llama whose feed-forward parts are mixtures of experts."""
    config = ModelConfig("llama", layers, WIDTH, 4, vocab=VOCAB, sequence=SEQUENCE, kv_heads=2, ffn=32)
    model = build(config)
    for block in model.blocks:
        gate = make_gate()
        block.mlp = MixtureOfExperts(gate, Experts(gate.num_experts, WIDTH, 24))
    return model
