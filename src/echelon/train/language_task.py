"""Language: a model that predicts the next token of a corpus."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from echelon.data import Batches, Corpus, open_corpus
from echelon.models import Transformer, build, cross_entropy, generate, load_hf
from echelon.train.batches import make_batches

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job

SAMPLE_TOKENS = 300
DEFAULT_EVALUATE_BATCHES = 4


@final
class LanguageTask:
    """Opens the corpus of a job."""

    unit = "tokens"
    measure = None
    loss: Callable[[Any, Any], tuple[Tensor, Tensor]] = staticmethod(cross_entropy)

    def __init__(self, job: "Job") -> None:
        self.config = job.model.config()
        self._corpus = open_corpus(job.data.text_source, vocab=self.config.vocab, dtype=job.data.dtype)
        self.training, self.validation = make_batches(job, self._corpus)
        self.num_parameters = self.config.num_parameters
        self.data_name, self.data_size = self._corpus.name, self.training.tokens
        self.num_validation_batches = _num_batches(self.validation, job.evaluate_batches)

    def build(self) -> Transformer:
        return build(self.config)

    def load(self, folder: str | Path) -> Transformer:
        return load_hf(folder)

    def sample(self, folder: Path) -> str:
        return sample(load_hf(folder), self._corpus)


def sample(model: Transformer, corpus: Corpus) -> str:
    """What the model writes after the first tokens of the corpus."""
    prompt = torch.from_numpy(corpus.tokens[:16].astype("int64"))
    tokens = generate(model, prompt, SAMPLE_TOKENS).numpy()
    return corpus.decode(tokens) if corpus.decode is not None else " ".join(map(str, tokens.tolist()))


def _num_batches(validation: Batches | None, most: int | None) -> int:
    if validation is None:
        return 0
    return min(DEFAULT_EVALUATE_BATCHES if most is None else most, validation.num_batches)
