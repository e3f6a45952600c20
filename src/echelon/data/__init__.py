"""Training data: a corpus of tokens, and the batches drawn from it."""

from echelon.data.corpus import Corpus, corpus_errors, open_corpus
from echelon.data.sampler import Batches, num_windows

__all__ = ["Batches", "Corpus", "corpus_errors", "num_windows", "open_corpus"]
