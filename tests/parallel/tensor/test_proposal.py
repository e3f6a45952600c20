"""Tables to paste: what the sizes of a model's modules say about them."""

import pytest
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.proposal import propose
from echelon.parallel.tensor.split import split_over


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))


class Fused(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(16, outputs), nn.Linear(16, 16)


class Block(nn.Module):
    """One matrix in each child, as in BERT's feed-forward."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(16)
        self.widen, self.narrow = nn.Sequential(nn.Linear(16, 40)), nn.Sequential(nn.Linear(40, 16))
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(attention), Block(attention)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64)


REST = {
    "tokens": "vocabulary",
    "positions": "replicated",
    "blocks.*.norm": "replicated",
    "blocks.*.widen.*": "column",
    "blocks.*.narrow.*": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "inner",
    "blocks.*.mlp.3": "row",
    "norm": "replicated",
    "head": "vocabulary",
}


def needed(model: nn.Module) -> set[nn.Module]:
    has_weights = {m for m in model.modules() if list(m.parameters(recurse=False))}
    return has_weights | {m for m in model.modules() if isinstance(m, nn.Dropout)}


@pytest.mark.parametrize(
    ("attention", "lines"),
    [
        (Separate(), {"q": "column", "k": "column", "v": "column", "o": "row", "heads": "divided"}),
        (Fused(48), {"qkv": "column/3", "proj": "row", "num_heads": "divided"}),
        (Fused(32), {"qkv": "column:4,2,2", "proj": "row", "num_heads": "divided"}),
    ],
)
def test_a_table_is_proposed_that_fits(attention: nn.Module, lines: dict[str, str]) -> None:
    model = Model(attention)
    table = propose(model, needed(model))
    of_attention = {p.rpartition(".")[2]: word for p, word in table.items() if "attention" in p}
    assert of_attention == lines
    assert {p: word for p, word in table.items() if "attention" not in p} == REST
    group = RecordingGroup("tensor", 0, 2)
    split_over(model, group, table, Wrapping(), sequence=False, whole_sequence=[], join_logits=True)


def test_torchs_attention_stays_whole() -> None:
    layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2)])
    table = propose(layers, needed(layers))
    assert table["*.self_attn"] == table["*.self_attn.out_proj"] == table["*.dropout1"] == "replicated"
    assert [table[f"*.{name}"] for name in ("linear1", "dropout", "linear2")] == ["column", "inner", "row"]


def test_matrices_that_lead_nowhere_stay_whole() -> None:
    model = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(5, 7)})])
    assert set(propose(model, needed(model)).values()) == {"replicated"}
