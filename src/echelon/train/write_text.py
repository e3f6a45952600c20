"""What a trained model writes after a prompt: `echelon generate`."""

from pathlib import Path
from typing import NamedTuple

import torch

from echelon.data.corpus import decode_bytes
from echelon.data.packing import BYTE_VOCAB
from echelon.data.tokenizer import TextTokenizer, has_tokenizer, load_tokenizer
from echelon.errors import UserError
from echelon.models import Transformer, generate, load_hf
from echelon.state.checkpoint.folder import RUN_FILE
from echelon.state.weight_files.weight_folder import CONFIG


class Written(NamedTuple):
    """The prompt and what follows it. `ended`: the model has drawn its end-of-text token."""

    folder: Path
    prompt: str
    text: str
    tokens: int
    ended: bool


def write_text(
    path: Path, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> Written:
    """Let the model of a run, or of a Hugging Face folder, go on from `prompt`."""
    folder = find_model(path)
    model = load_hf(folder)
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    if torch.cuda.is_available():
        model.to("cuda")
    ids = torch.tensor(_prompt_ids(model, tokenizer, folder, prompt), device=next(model.parameters()).device)
    end = None if tokenizer is None else tokenizer.end
    all_ids = generate(model, ids, tokens, temperature, top_k, seed, end).cpu()
    new = all_ids[len(ids) :].tolist()
    text = decode_bytes(all_ids.numpy()) if tokenizer is None else tokenizer.decode(all_ids.tolist())
    return Written(folder, prompt, text, len(new), ended=new[-1:] == [end])


def find_model(path: Path) -> Path:
    """The Hugging Face folder that is meant: that of a finished run, or the folder itself."""
    for folder in (path, path / "model"):
        if (folder / CONFIG).is_file():
            return folder
    if not path.exists():
        raise UserError(f"{path}: there is no such folder; name a run, like runs/train-20300102-030405")
    if (path / RUN_FILE).is_file():
        raise UserError(
            f"{path}: the run has no model/ yet, which it writes at its end; write its last checkpoint with "
            f"echelon export {path} --to hf, and name that folder"
        )
    raise UserError(f"{path}: is no run and no Hugging Face folder: it has neither model/ nor {CONFIG}")


def _prompt_ids(model: Transformer, tokenizer: TextTokenizer | None, folder: Path, prompt: str) -> list[int]:
    if tokenizer is None:
        if model.config.vocab != BYTE_VOCAB:
            raise UserError(
                f"{folder}: has no tokenizer, and a vocabulary of {model.config.vocab}, not of "
                f"{BYTE_VOCAB} bytes; put the tokenizer.json of its training there"
            )
        ids = list(prompt.encode(errors="replace"))
    else:
        ids = [*tokenizer.prefix, *tokenizer.encode([prompt])[0]]
        if not ids and tokenizer.end is not None:  # what stands before a text, where nothing else does
            ids = [tokenizer.end]
    if not ids:
        raise UserError("the prompt is empty: give the model something to go on from")
    return ids
