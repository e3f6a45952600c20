"""Training data: a corpus of tokens, labelled images, and batches of both; batches of any other dataset."""

from echelon.data.corpus import Corpus, corpus_errors, open_corpus
from echelon.data.dataset_loader import Loader, StreamLoader, loader
from echelon.data.image_batches import ImageData, TrainingImages, ValidationImages, open_images
from echelon.data.sampler import Batches, num_windows
from echelon.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "Batches",
    "Corpus",
    "ImageData",
    "Loader",
    "StreamLoader",
    "TextTokenizer",
    "TrainingImages",
    "ValidationImages",
    "corpus_errors",
    "load_tokenizer",
    "loader",
    "num_windows",
    "open_corpus",
    "open_images",
]
