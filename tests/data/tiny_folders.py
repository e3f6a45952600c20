"""Tokenizers and models of transformers, small, made here: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import torch

BEGIN, END = 0, 1  # ids
NUM_IDS = 258  # both of them, and the 256 bytes


def tokenizer_json(*, begins: bool = True) -> dict[str, Any]:
    """A tokenizer.json with an id for each byte of text; `begins`: it puts <s> before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": BEGIN, "</s>": END} | {letter: number for number, letter in enumerate(alphabet, 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BEGIN)]
        )
    return dict(json.loads(tokenizer.to_str()))


def make_tokenizer(folder: Path, *, begins: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(begins=begins)), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def llama() -> Any:
    """A Llama of transformers with so many ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_IDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


def make_model(folder: Path) -> Path:
    """A folder as `save_pretrained` of a model and of its tokenizer writes it."""
    make_tokenizer(folder)
    llama().save_pretrained(folder)
    return folder


def write_texts(folder: Path, count: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        text = f"Text number {number}. " + "It says more. " * (number % 5 + 1)
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder
