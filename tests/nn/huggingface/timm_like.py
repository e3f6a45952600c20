"""A vision transformer with the names and the attributes of timm's, which need not be installed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = HEADS, WIDTH // HEADS, WIDTH
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.norm, self.attn_drop, self.proj_drop = nn.LayerNorm(WIDTH), nn.Dropout(0.0), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, places, _ = x.shape
        fused = self.qkv(x).view(samples, places, 3, self.num_heads, self.head_dim).transpose(1, 3)
        query, key, value = fused.unbind(2)
        mixed = F.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value)
        joined = mixed.transpose(1, 2).reshape(samples, places, self.attn_dim)
        result: Tensor = self.proj_drop(self.proj(self.norm(joined)))
        return result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.LayerNorm(24)
        self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop2(self.fc2(self.norm(self.drop1(F.gelu(self.fc1(x))))))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            Mlp(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.pos_drop, self.blocks = nn.Dropout(0.1), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(self.pos_drop(x)))[:, 0])
        return logits


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 3, 8, 8, generator=generator), torch.randint(3, (5,), generator=generator)
