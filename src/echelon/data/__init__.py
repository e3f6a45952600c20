"""Training data: a corpus of tokens, and the batches drawn from it."""

from echelon.data.corpus import Corpus, open_corpus
from echelon.data.sampler import Batches

__all__ = ["Batches", "Corpus", "open_corpus"]
