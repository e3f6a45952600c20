"""A model whose attention needs the rarer words of a table; importable, so that ranks can build it."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, SIZE = 8, 4, 2, 3  # SIZE: of a head


class Grouped(nn.Module):
    """Query, key and value in one, with fewer heads of keys and values; norms over all heads together."""

    def __init__(self, config: SimpleNamespace, groups: int) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        self.fused = nn.Linear(WIDTH, (HEADS + 2 * groups) * SIZE)
        self.query_norm, self.value_norm = nn.RMSNorm(HEADS * SIZE), nn.LayerNorm(groups * SIZE)
        self.output = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        heads = self.config.heads
        query, key, value = self.fused(x).split([n * SIZE for n in (heads, self.groups, self.groups)], -1)
        query, value = self.query_norm(query), self.value_norm(value)
        query, key, value = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=True)
        mixed_heads: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return mixed_heads


class LowRank(nn.Module):
    """A narrow projection before the heads, of which one feature goes to all heads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.norm = nn.Linear(WIDTH, 4), nn.LayerNorm(3)
        self.widen, self.output = nn.Linear(3, HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rank, shared = self.narrow(x).split([3, 1], -1)
        result: Tensor = self.output(torch.tanh(self.widen(self.norm(rank)) * shared))
        return result


class Head(nn.Module):
    """Holds the bias of its projection, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 6)
        self.bias = self.projection.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.projection(x)
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(heads=HEADS, groups=GROUPS)
        self.distance = nn.Embedding(9, HEADS)  # a bias for each head
        self.grouped, self.one_key = Grouped(self.config, GROUPS), Grouped(self.config, 1)
        self.low_rank, self.head = LowRank(), Head()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        distances = (places[:, None] - places).clamp(-4, 4) + 4
        bias = self.distance(distances).permute(2, 0, 1)[None]
        fixed = torch.linspace(0, 1, HEADS, device=x.device, dtype=x.dtype)[None, :, None, None]
        x = x + self.grouped(x, bias)
        x = x + self.one_key(x, fixed.expand(1, HEADS, x.shape[1], x.shape[1]))
        result: Tensor = self.head(x + self.low_rank(x))
        return result


TABLE = {
    "distance": "column",
    "grouped.fused": "column:heads,groups,groups",
    "one_key.fused": "column:heads,1 whole,1 whole",
    "one_key(bias)": "heads:heads",
    "*.config.heads": "divided",
    "grouped.groups": "divided",
    "*.query_norm": "norm",
    "grouped.value_norm": "norm",
    "one_key.value_norm": "heads",
    "low_rank": "enclosed",
    "low_rank.narrow": "heads",
    "low_rank.norm": "heads",
    "low_rank.widen": "column",
    "*.output": "row",
    "head": "tied",
    "head.projection": "vocabulary",
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(5, 4, WIDTH, generator=generator),
        torch.randint(6, (5, 4), generator=generator),
    )
