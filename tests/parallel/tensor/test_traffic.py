"""The bytes that tensor parallelism sends and the activations that it keeps, against the formulas."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from tests.cases import adamw
from tests.instrumented import accept
from tests.parallel.tensor.models import SEQUENCE, VOCAB, tokens

Warm = Callable[[int], Ranks]

LAYERS, WIDTH, SAMPLES = 3, 32, 4
HIDDEN = SAMPLES * SEQUENCE * WIDTH * 4  # bytes of b·s·h in float32


def model(family: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    heads = {"kv_heads": 4, "ffn": 48} if family == "llama" else {}
    return build(
        ModelConfig(family, LAYERS, WIDTH, 8, vocab=VOCAB, sequence=SEQUENCE, dropout=dropout, **heads)
    )


def count_moves(family: str, plan: str) -> Counter[tuple[str, int]]:
    engine = echelon.parallelize(model(family), plan, optimizer=adamw, loss=cross_entropy)
    engine.step(engine.local(tokens(0, SAMPLES)))
    return Counter(
        (move.operation, move.traffic.payload)
        for move in engine.ledger.moves
        if move.axis == "tensor" and move.subject == "tensor parallelism"
    )


@pytest.mark.slow_cases("4-gpt", "4-llama")
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_four_all_reduces_per_layer_and_step(warm_ranks: Warm, family: str, ranks: int) -> None:
    """And one for the embedding in the forward pass, one for the logits in the backward pass."""
    for counts in warm_ranks(ranks).run(count_moves, family, f"tensor={ranks}"):
        assert counts == {("all_reduce", HIDDEN): 4 * LAYERS + 2}


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_microbatches_move_the_same_in_parts(warm_ranks: Warm, family: str) -> None:
    for counts in warm_ranks(2).run(count_moves, family, "tensor=2 microbatches=2"):
        assert counts == {("all_reduce", HIDDEN // 2): 2 * (4 * LAYERS + 2)}


def bytes_of_layers(family: str, plan: str) -> tuple[dict[str, int], int]:
    """Of a step, without what the embedding and the logits take; and the bytes sent."""
    engine = echelon.parallelize(model(family), plan, optimizer=adamw, loss=cross_entropy)
    engine.step(engine.local(tokens(0, SAMPLES)))
    moves = [m for m in engine.ledger.moves if m.axis == "tensor" and m.subject == "tensor parallelism"]
    return dict(Counter(move.operation for move in moves)), sum(move.traffic.sent for move in moves)


def test_sequence_parallelism_moves_the_same_bytes(warm_ranks: Warm) -> None:
    """Each sum is a sum of parts, and each part is gathered once: 4 + 4 instead of 4 all-reduces per layer.
    The hidden states of the embedding are split after their sum, and gathered in the backward pass."""
    for plain, split in zip(
        warm_ranks(2).run(bytes_of_layers, "gpt", "tensor=2"),
        warm_ranks(2).run(bytes_of_layers, "gpt", "tensor=2 sequence=true"),
        strict=True,
    ):
        assert split[0] == {"all_reduce": 1, "reduce_scatter": 4 * LAYERS + 1, "all_gather": 4 * LAYERS + 2}
        assert split[1] - plain[1] == HIDDEN // 2  # the gather behind the embedding


def saved_by(family: str, plan: str) -> dict[str, int]:
    """Bytes that autograd keeps for norms and dropouts behind the embedding, by kind."""
    engine = echelon.parallelize(
        model(family, dropout=0.1), plan, optimizer=adamw, loss=cross_entropy, audit="off"
    )
    kept: Counter[str] = Counter()
    for name, module in engine.module.named_modules():
        if name.startswith(("blocks", "head")) and isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Dropout):
            _count_saved(module, kept)
    accept(engine)
    engine.step(engine.local(tokens(0, SAMPLES)))
    return dict(kept)


def _count_saved(module: nn.Module, kept: Counter[str]) -> None:
    inner, kind = module.forward, "dropout" if isinstance(module, nn.Dropout) else "norm"
    weights = {parameter.data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[kind] += tensor.untyped_storage().nbytes()
        return tensor

    def watched(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(*args)

    module.forward = watched


@pytest.mark.slow_cases("2-llama", "4-gpt", "4-llama")
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_and_dropouts_keep_a_part_of_their_activations(
    warm_ranks: Warm, family: str, ranks: int
) -> None:
    plain = warm_ranks(ranks).run(saved_by, family, f"tensor={ranks}")
    split = warm_ranks(ranks).run(saved_by, family, f"tensor={ranks} sequence=true")
    for whole, part in zip(plain, split, strict=True):
        assert whole.keys() == part.keys() == {"norm", "dropout"}
        assert {kind: size * ranks for kind, size in part.items()} == whole
