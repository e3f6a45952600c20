"""Models of peft around small models of transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.foreign.language import LANGUAGE, SAMPLES, SEQUENCE, VOCAB

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(kind: str, targets: list[str], **options: Any) -> nn.Module:
    """LoRA that is no zero at the start."""
    import peft

    config = {"r": 2, "lora_alpha": 4, "init_lora_weights": False, "fan_in_fan_out": kind == "gpt2"}
    model = LANGUAGE[kind].model()
    return peft.get_peft_model(model, peft.LoraConfig(**(config | options), target_modules=targets))


def two_adapters() -> nn.Module:
    import peft

    model: Any = lora("llama", ["q_proj"])
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(lora, "llama", ALL),
    "dropout": partial(lora, "llama", ALL, lora_dropout=0.3),
    "last layer": partial(lora, "llama", ALL, layers_to_transform=[1]),
    "patterns": partial(
        lora, "llama", ALL, rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 7}, use_rslora=True
    ),
    "dora": partial(lora, "llama", ALL, use_dora=True),
    "modules to save": partial(lora, "llama", ["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "embedding": partial(lora, "llama", ["q_proj", "embed_tokens"]),
    "head": partial(lora, "llama", ["q_proj", "lm_head"]),
    "tied": partial(lora, "gpt2", ["c_attn", "wte"]),
    "gpt2": partial(lora, "gpt2", ["c_attn", "c_fc", "c_proj"], lora_dropout=0.2),
    "deepseek": partial(
        lora, "deepseek_v2", ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"], lora_dropout=0.2
    ),
    "mixtral": partial(lora, "mixtral", ["q_proj", "o_proj"]),
    "experts": partial(
        lora, "mixtral", ["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "two": two_adapters,
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output: Any, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)
