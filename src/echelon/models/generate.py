"""Text from a trained model, one token after another.

It has no key/value cache, so each token costs a whole forward pass. It is for looking at what a training run
has learned, not for serving.
"""

import torch
from torch import Tensor

from echelon.errors import raise_errors
from echelon.models.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_tokens: Tensor,
    length: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end: int | None = None,
) -> Tensor:
    """Return the prompt, [sequence] or [batch, sequence], followed by `length` sampled tokens.

    Each token is drawn from the `top_k` likeliest (None: from all), with probabilities sharpened by a
    `temperature` below 1; 0 always takes the likeliest. The same seed gives the same tokens and torch's
    global seed is not touched. The model sees the last `config.sequence` tokens. A row that has drawn `end`
    is over and filled up with it; when all are, fewer tokens are returned.
    """
    _check(model, prompt_tokens, length, temperature, top_k)
    tokens = prompt_tokens if prompt_tokens.ndim == 2 else prompt_tokens[None]
    dice = torch.Generator().manual_seed(seed)
    was_training = model.training
    is_over = torch.zeros(len(tokens), 1, dtype=torch.bool)
    model.eval()
    try:
        for _ in range(length):
            logits = model(tokens[:, -model.config.sequence :])[:, -1]
            # Drawn on the CPU, whose generator gives the same numbers beside every kind of device.
            drawn = _draw(logits.cpu(), temperature, top_k, dice)
            if end is not None:
                drawn = drawn.masked_fill(is_over, end)
                is_over |= drawn == end
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
            if bool(is_over.all()):
                break
    finally:
        model.train(was_training)
    return tokens if prompt_tokens.ndim == 2 else tokens[0]


def _draw(logits: Tensor, temperature: float, top_k: int | None, dice: torch.Generator) -> Tensor:
    """Draw one token for each row of logits [batch, vocab], as [batch, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    scores = likeliest.to(torch.promote_types(likeliest.dtype, torch.float32))
    return tokens.gather(-1, torch.multinomial((scores / temperature).softmax(dim=-1), 1, generator=dice))


def _check(model: Transformer, prompt: Tensor, length: int, temperature: float, top_k: int | None) -> None:
    errors = []
    vocab = model.config.vocab
    if prompt.dtype not in (torch.int32, torch.int64):
        errors.append(f"prompt_tokens are {prompt.dtype}: must be token ids, torch.int64")
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        errors.append(
            f"prompt_tokens have shape {list(prompt.shape)}: must be [sequence] or [batch, sequence], "
            "with at least one token"
        )
    elif prompt.min() < 0 or prompt.max() >= vocab:
        errors.append(
            f"prompt_tokens hold ids from {int(prompt.min())} to {int(prompt.max())}: the vocabulary of this "
            f"model is 0 to {vocab - 1}"
        )
    if length < 0:
        errors.append(f"length={length}: must be 0 or more")
    if not temperature >= 0:
        errors.append(f"temperature={temperature}: must be 0 (always the likeliest token) or more")
    if top_k is not None and top_k < 1:
        errors.append(f"top_k={top_k}: must be at least 1, or None to draw from all tokens")
    raise_errors("generate", errors)
