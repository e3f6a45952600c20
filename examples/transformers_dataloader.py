"""Train a model of transformers from a loader of dict batches, under any plan.

    python examples/transformers_dataloader.py "data=2 zero=3"
    torchrun --nproc-per-node 2 examples/transformers_dataloader.py "pipeline=2 microbatches=2"

The model is small and new, so nothing is downloaded: it learns to count. Every plan trains it alike, and the
folder that it writes is one that transformers loads.
"""

import os
import sys
from collections.abc import Iterable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import echelon

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
DATASET = [(torch.arange(4 + start % 9) + start) % 32 for start in range(48)]  # of different lengths


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the collators of transformers return."""
    labels = pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def main(plan: str, folder: str) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    losses = []
    with echelon.parallelize(model, plan, optimizer=adamw) as engine:
        loader = echelon.data.loader(DATASET, batch_size=8, engine=engine, shuffle=True, collate_fn=collate)
        for _ in range(3):
            for batch in loader:
                losses.append(engine.step(batch).loss)
        engine.save_pretrained(folder)
    return losses


if __name__ == "__main__":
    text, target, *_ = [*sys.argv[1:], *["data=2", "runs/counting"][len(sys.argv) - 1 :]]
    first, *_, last = echelon.launch(main, echelon.Plan.parse(text).ranks, text, target)[0]
    if os.environ.get("RANK", "0") == "0":
        print(f"plan '{text}': loss {first:.3f} → {last:.3f}; the model is in {target}")
