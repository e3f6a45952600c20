"""The rules of a job that trains a language model: its sizes, and its corpus."""

from typing import TYPE_CHECKING

from echelon.data import Corpus, corpus_errors, open_corpus
from echelon.models import ModelConfig
from echelon.train.batches import make_batches
from echelon.train.jobs.foreign_keys import refuse_foreign_keys
from echelon.train.runs.findings import Findings

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job


def check_language_model(job: "Job", findings: Findings) -> ModelConfig | None:
    """The sizes of the model, if they are valid."""
    refuse_foreign_keys(job, findings)
    # Sizes are checked together only if all are known; otherwise check at least the preset.
    model = job.model if findings.all_valid("model") else job.model.without_sizes()
    config = findings.attempt(model.config, "model", "model")
    if config is None or not findings.all_valid("model"):
        return None
    if findings.all_valid("sequence") and job.sequence_length > config.sequence:
        findings.add(
            f"sequence={job.sequence}: the model reads at most {config.sequence} tokens; "
            f"set model.sequence={job.sequence} too",
            "sequence",
        )
    return config


def check_language_data(job: "Job", config: ModelConfig | None, findings: Findings) -> None:
    corpus = _check_corpus(job, config, findings)
    needed = ("plan", "batch", "sequence", "seed", "data.validation_fraction")
    if corpus is not None and findings.all_valid(*needed):
        findings.attempt(lambda: make_batches(job, corpus), f"data.source={job.data.text_source}")


def _check_corpus(job: "Job", config: ModelConfig | None, findings: Findings) -> Corpus | None:
    """The corpus. It is opened here first, so that its errors show before a rank starts."""
    source, dtype = job.data.text_source, job.data.dtype
    where = f"data.source={source}"
    if not findings.all_valid("data.source", "data.dtype"):
        return None
    if config is not None:
        vocab = config.vocab
        return findings.attempt(lambda: open_corpus(source, vocab=vocab, dtype=dtype), where)
    for error in corpus_errors(source, vocab=None, dtype=dtype):
        findings.add(f"{where}: {error}")
    return None
