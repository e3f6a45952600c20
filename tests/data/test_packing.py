"""Packed documents: their tokens on disk, and rows in which each is computed as if it were alone."""

import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.data import Batches, Corpus, load_tokenizer, open_corpus
from echelon.data import packing as packing_module
from echelon.data.documents import Piece, find_source
from echelon.data.packing import encode, open_store, row_positions
from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.batch import call
from tests.data.test_documents import write_lines
from tests.data.tiny_folders import BEGIN, END, NUM_IDS, llama, make_tokenizer, write_texts


def test_a_document_has_its_marks_around_all_of_its_pieces(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    a, b = tokenizer.encode(["a", "b"])
    pieces = [Piece("a", ends=False), Piece("b", ends=True), Piece("b", ends=True)]
    parts = list(encode(pieces, tokenizer))
    assert [part.ids for part in parts] == [[BEGIN, *a], [*b, END], [BEGIN, *b, END]]
    assert [part.begins for part in parts] == [True, False, True]
    assert [part.ids for part in encode(pieces, None)] == [[97], [98], [98]]


def test_tokens_are_made_once_and_again_when_a_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, cache = write_texts(tmp_path / "texts"), str(tmp_path / "cache")
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer"))
    store = open_store(find_source(texts), tokenizer, None, cache)
    assert (len(store.starts), store.tokens.dtype.name) == (12, "uint16")
    assert all(store.tokens[start] == BEGIN for start in store.starts)
    with monkeypatch.context() as patch:
        patch.setattr(packing_module, "_make", lambda *_: pytest.fail("made again"))
        assert np.array_equal(open_store(find_source(texts), tokenizer, None, cache).tokens, store.tokens)
    (texts / "00.txt").write_text("It is another one.")
    again = open_store(find_source(texts), tokenizer, None, cache)
    assert tokenizer.decode(again.tokens[: again.starts[1]].tolist()) == "It is another one."


def test_half_a_store_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed while it made one; and one that cannot read its source leaves nothing."""
    texts, cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
    key = packing_module._key(find_source(texts), None, None)
    (cache / f"{key}.partial").mkdir(parents=True)
    (cache / f"{key}.partial" / "tokens.bin").write_bytes(b"half")
    assert len(open_store(find_source(texts), None, None, str(cache)).starts) == 12
    rows = find_source(write_lines(tmp_path / "a.jsonl", [3]))
    with pytest.raises(UserError, match="has no text under 'text'"):
        open_store(rows, None, None, str(cache))
    assert {path.suffix for path in cache.iterdir()} == {"", ".lock"}


def test_the_cache_is_that_of_the_user_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert packing_module.cache_folder() == Path("/caches/echelon/tokens")
    assert packing_module.cache_folder("/other") == Path("/other")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"set data\.cache to a folder with room"):
        open_store(find_source(write_texts(tmp_path / "texts")), None, None, str(tmp_path / "cache" / "new"))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": ""}])
    with pytest.raises(UserError, match="there is no text in it"):
        open_store(find_source(path), None, None, str(tmp_path / "cache"))


def test_positions_start_again_with_each_document_and_each_row() -> None:
    starts = np.array([0, 5, 6])
    rows = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    assert row_positions(rows, starts).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 2, 3]]


def test_rows_without_a_tokenizer_are_bytes_of_documents(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["abc", "de", "fghij"])
    corpus = open_corpus(str(path), vocab=256, cache=str(tmp_path / "cache"))
    batches = Batches(corpus, batch=1, sequence=4, seed=0, validation_fraction=0.0)
    rows = {}
    for step in (0, 1):
        inputs, targets = batches.at(step)
        positions = inputs.kwargs["position_ids"][0].tolist()
        rows[bytes(inputs.args[0][0].tolist())] = positions, targets[0].tolist()
    e, _, g, h, i = b"efghi"
    assert rows == {
        b"abcd": ([0, 1, 2, 0], [98, 99, -100, e]),
        b"efgh": ([0, 0, 1, 2], [-100, g, h, i]),
    }


# Equal to documents alone.

SMALL = ModelConfig("gpt", layers=2, width=16, heads=4, vocab=NUM_IDS, sequence=30)
MODELS = {
    "gpt": lambda: build(SMALL),
    "llama": lambda: build(ModelConfig("llama", 2, 16, 4, NUM_IDS, 30, kv_heads=2)),
    "transformers": llama,
}


def packed_batch(tmp_path: Path) -> tuple[Corpus, Any, Tensor]:
    """All of a small corpus, in rows of 30 tokens."""
    texts = ["A cat.", "The dog sat.", "x", "He ran far.", "It is so.", "b", "A mat, a hat."]
    path = write_lines(tmp_path / "a.jsonl", texts)
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer"))
    corpus = open_corpus(str(path), vocab=NUM_IDS, tokenizer=tokenizer, cache=str(tmp_path / "cache"))
    batches = Batches(corpus, batch=2, sequence=30, seed=0, validation_fraction=0.0)
    inputs, targets = batches.at(0)
    return corpus, inputs, targets


def parts_alone(inputs: Any, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each document of each row, or the part of it that is there, as a batch of its own."""
    tokens, positions = inputs.args[0], inputs.kwargs["position_ids"]
    parts = []
    for row, places, wanted in zip(tokens, positions, targets, strict=True):
        begins = [*(places == 0).nonzero().flatten().tolist(), len(row)]
        for begin, end in pairwise(begins):
            parts.append((row[None, begin:end], wanted[None, begin:end]))
    return parts


def gradients(model: nn.Module, total: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, list(model.parameters())))


@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_row_is_equal_to_its_documents_alone(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    if kind == "transformers":  # with a cache for generation it does not tell documents apart
        model.config.use_cache = False
    _, inputs, targets = packed_batch(tmp_path)
    total, count = cross_entropy(call(model, inputs), targets)
    alone = [cross_entropy(model(tokens), wanted) for tokens, wanted in parts_alone(inputs, targets)]
    assert len(alone) > 2 * len(targets)  # several in a row
    assert count == sum(int(number) for _, number in alone)
    expected = torch.stack([part for part, number in alone if number]).sum()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)
    for own, other in zip(gradients(model, total), gradients(model, expected), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("plan", ["data=1", "recompute=full"])
@pytest.mark.parametrize("kind", ["gpt", "transformers"])
def test_an_engine_computes_packed_rows_so(kind: str, plan: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().double()  # one of transformers would make a cache, and so mix documents
    _, inputs, targets = packed_batch(tmp_path)
    with torch.no_grad():
        alone = [cross_entropy(model(tokens), wanted) for tokens, wanted in parts_alone(inputs, targets)]
    expected = sum(float(total) for total, count in alone if count) / sum(int(count) for _, count in alone)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with parallelize(model, f"{plan} precision=fp64", optimizer=optimizer, loss=cross_entropy) as engine:
        assert engine.step((inputs, targets)).loss == pytest.approx(expected, abs=1e-12)


def test_without_boundaries_it_would_not_be() -> None:
    """The test above can fail: tokens of other documents do change the loss."""
    torch.manual_seed(0)
    model = build(SMALL).double()
    tokens = torch.arange(12)[None]
    positions = torch.tensor([[*range(7), *range(5)]])
    whole, packed = model(tokens), model(tokens, position_ids=positions)
    torch.testing.assert_close(whole[:, :7], packed[:, :7])
    assert (whole[:, 7:] - packed[:, 7:]).abs().max() > 1e-4
