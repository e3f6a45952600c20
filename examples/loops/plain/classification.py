"""Sequence classification with a model of transformers, and an evaluation after each epoch."""

import torch
from examples.loops.models import classes
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

CONFIG = BertConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def train(steps: int = 3) -> tuple[dict[str, Tensor], float]:
    model = BertForSequenceClassification(CONFIG).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(steps):
        batch = {"input_ids": classes(step, 24, 8, 6), "labels": classes(step, 3, 8)}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    model.eval()
    batch = {"input_ids": classes(99, 24, 8, 6), "labels": classes(99, 3, 8)}
    with torch.no_grad():
        right = (model(**batch).logits.argmax(-1) == batch["labels"]).double()
    return model.state_dict(), right.mean().item()
