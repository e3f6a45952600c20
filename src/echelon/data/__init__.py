"""Training data: a corpus of tokens, and the batches drawn from it; batches of any other dataset."""

from echelon.data.corpus import Corpus, corpus_errors, open_corpus
from echelon.data.dataset_loader import Loader, loader
from echelon.data.sampler import Batches, num_windows

__all__ = ["Batches", "Corpus", "Loader", "corpus_errors", "loader", "num_windows", "open_corpus"]
