"""SFTTrainer of TRL on a few sentences, plain or under a plan: prints its losses."""

import json
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from echelon.integrations import WithPlan

TEXTS = ["the cat sat on a mat", "a dog ran to the house", "the dog sat", "a cat ran and sat on the mat"] * 6
WORDS = ["<pad>", "</s>", "the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "house"]


class PlannedSFT(WithPlan, SFTTrainer):
    """Equal to SFTTrainer, under any plan."""


def tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: place for place, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def main(plan: str | None) -> list[float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, **special)).double()
    replicas = 2 if plan is not None and "data=2" in plan else 1
    options = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    options |= {"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=8 // replicas,
            max_steps=6,
            logging_steps=1,
            learning_rate=1e-2,
            **options,
        )
        given = {"train_dataset": Dataset.from_dict({"text": TEXTS}), "processing_class": tokenizer()}
        if plan is None:
            trainer = SFTTrainer(model, args, **given)
        else:
            trainer = PlannedSFT(model, args, plan=plan, **given)
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    losses = main(*sys.argv[1:2] or [None])
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps({"losses": losses}))
