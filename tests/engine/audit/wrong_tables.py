"""Small models with tables that fit their shapes, right ones and wrong ones; importable, so that ranks can
build them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = F.gelu(self.up(x))
        if self.between == "softmax":
            h = h.softmax(-1)
        if self.between == "norm":
            h = F.layer_norm(h, h.shape[-1:])
        if self.between == "mean":
            h = h - h.mean(-1, keepdim=True)
        return x + self.down(h)


class Blocks(nn.Module):
    """A model with a forward of its own."""

    num_outputs = 5

    def __init__(self, between: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(""), Block(between)])
        self.head = nn.Linear(WIDTH, self.num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Listed(Blocks):
    """The same, which lists its layers."""

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]


class Shifted(nn.Module):
    """What each rank adds to its features is computed from these alone. It starts at zero, so that the first
    output is right."""

    num_outputs = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.shift = nn.Linear(1, 1)
        nn.init.zeros_(self.shift.weight)
        nn.init.zeros_(self.shift.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return x + self.down(h + self.shift(h.mean(-1, keepdim=True)))


class Row(nn.Sequential):
    """A column and a row are layers of their own."""

    num_outputs = WIDTH

    def __init__(self, between: nn.Module) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), between, nn.Linear(4 * WIDTH, WIDTH))


RIGHT = {
    "embedding": "replicated",
    "*norm": "replicated",
    "head": "replicated",
    "*attention.qkv": "column/3",
    "*attention.out": "row",
    "*attention.heads": "divided",
    "*up": "column",
    "*down": "row",
}


class Example(NamedTuple):
    """`says`: what the error must contain; nothing where the table is right."""

    model: nn.Module
    table: dict[str, str]
    says: tuple[str, ...] = ()


NOT_DIVIDED = {name: word for name, word in RIGHT.items() if word != "divided"}
IN_A_ROW = {"0": "column", "1": "replicated", "2": "row"}
NAMES: dict[str, Callable[[], Example]] = {
    "right": lambda: Example(Blocks(""), RIGHT),
    "right layers": lambda: Example(Listed(""), RIGHT),
    "right row of layers": lambda: Example(Row(nn.GELU()), IN_A_ROW),
    "not divided": lambda: Example(Blocks(""), NOT_DIVIDED, ("tensor_table",)),
    "fused as one": lambda: Example(Blocks(""), {**RIGHT, "*attention.qkv": "column"}, ("from ",)),
    "softmax": lambda: Example(Blocks("softmax"), RIGHT, ("from ", "tensor_table")),
    "norm": lambda: Example(Blocks("norm"), RIGHT, ("from ", "tensor_table")),
    "mean": lambda: Example(Listed("mean"), RIGHT, ("from ", "tensor_table")),
    "softmax in a row": lambda: Example(Row(nn.Softmax(-1)), IN_A_ROW, ("from 2.",)),
    "shift": lambda: Example(
        Shifted(),
        {"up": "column", "down": "row", "shift": "inner"},
        ("from shift.",),
    ),
}


def example(name: str) -> Example:
    """In float64, always with the same weights."""
    torch.manual_seed(0)
    model, table, says = NAMES[name]()
    return Example(model.double(), table, says)
