"""Sequence classification with a model of transformers, and an evaluation after each epoch."""

from functools import partial

import torch
from examples.loops.models import classes
from examples.loops.plain.classification import CONFIG
from torch import Tensor
from transformers import BertForSequenceClassification

import echelon


def train(plan: str, steps: int = 3) -> tuple[dict[str, Tensor], float]:
    model = BertForSequenceClassification(CONFIG).double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    for step in range(steps):
        batch = engine.local({"input_ids": classes(step, 24, 8, 6), "labels": classes(step, 3, 8)})
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.update()
    model.eval()
    batch = engine.local({"input_ids": classes(99, 24, 8, 6), "labels": classes(99, 3, 8)})
    with torch.no_grad():
        right = (engine(**batch).logits.argmax(-1) == batch["labels"]).double()
    return engine.full_state_dict(), engine.average(right.mean().item(), len(right))
