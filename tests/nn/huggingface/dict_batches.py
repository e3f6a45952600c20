"""Trainings of transformers' models on batches of tokenizers, by an engine and by a plain loop."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import echelon
from echelon.verify.case import Float64

VOCAB, STEPS = 48, 3
_SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
_LLAMA = {**_SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}
_BERT = {**_SMALL, "num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**_LLAMA, num_local_experts=4, experts_implementation="eager")
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=4,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**_BERT)),
    "classifier": lambda: BertForSequenceClassification(BertConfig(**_BERT, num_labels=3)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[kind]()
    return model.double()


def make_batch(
    kind: str, step: int, padding: str = "right", samples: int = 4, length: int = 8
) -> BatchEncoding:
    """Samples with different numbers of labels that count; the first has fewest."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (samples, length), generator=draw)
    mask = torch.ones_like(tokens)
    for row, missing in enumerate((4, 1, 0, 2)[:samples]):
        columns = slice(length - missing, None) if padding == "right" else slice(0, missing)
        mask[row, columns] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1, :3] = -100
    if kind == "classifier":
        labels = torch.randint(0, 3, (samples,), generator=draw)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if padding == "positions":
        batch["position_ids"] = torch.arange(length)[None] + torch.arange(samples)[:, None]
    return BatchEncoding(batch)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(kind: str, plan: str, padding: str) -> tuple[dict[str, Tensor], list[float]]:
    """All weights and losses after a few steps; in float64 all the way."""
    with (
        Float64(),
        echelon.parallelize(make_model(kind), f"{plan} precision=fp64", optimizer=make_optimizer) as engine,
    ):
        batches = [engine.local(make_batch(kind, step, padding)) for step in range(STEPS)]
        losses = [engine.step(batch).loss for batch in batches]
        losses.append(engine.evaluate(batches[0]).loss)
        return engine.full_state_dict(), losses


def train_all(kinds: list[str], plan: str, padding: str) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    return {kind: train(kind, plan, padding) for kind in kinds}


def train_plain(kind: str, padding: str) -> tuple[dict[str, Tensor], list[float]]:
    """The loop of transformers' own documentation."""
    model = make_model(kind).train()
    optimizer, losses = make_optimizer(model.parameters()), []
    with Float64():
        for step in range(STEPS):
            loss = model(**make_batch(kind, step, padding)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            losses.append(float(model.eval()(**make_batch(kind, 0, padding)).loss))
    return model.state_dict(), losses
