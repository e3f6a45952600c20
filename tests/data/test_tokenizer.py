"""Tokenizers of local folders: the ids of text, and those around a document."""

import json
import sys
from pathlib import Path

import pytest

from echelon.data.tokenizer import has_tokenizer, load_tokenizer
from echelon.errors import UserError
from tests.data.tiny_folders import BEGIN, END, NUM_IDS, make_tokenizer


def test_ids_go_to_text_and_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    (ids,) = tokenizer.encode(["Grün is green."])
    assert tokenizer.decode(ids) == "Grün is green."
    assert tokenizer.decode([BEGIN, *ids, END]) == "Grün is green."
    assert (tokenizer.vocab, max(ids) < NUM_IDS) == (NUM_IDS, True)


def test_what_stands_around_a_text_is_the_tokenizer_s_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "with"))
    assert (tokenizer.prefix, tokenizer.suffix, tokenizer.end) == ((BEGIN,), (), END)
    bare = load_tokenizer(make_tokenizer(tmp_path / "without", begins=False))
    assert (bare.prefix, bare.suffix, bare.end) == ((), (), END)
    assert bare.fingerprint != tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "with").fingerprint == tokenizer.fingerprint


def test_the_end_may_be_an_id_of_the_model_or_unknown(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert load_tokenizer(folder).end == load_tokenizer(folder).encode(["a"])[0][0]
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).end is None
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_tokenizer(folder).end == 7
    assert load_tokenizer(folder / "tokenizer.json").end is None


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "a"))
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").fingerprint == tokenizer.fingerprint
    file = load_tokenizer(tmp_path / "a" / "tokenizer.json")
    file.save(tmp_path / "c")
    assert load_tokenizer(tmp_path / "c").encode(["x y"]) == tokenizer.encode(["x y"])


def test_files_of_an_older_kind_are_converted_by_transformers(tmp_path: Path) -> None:
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    assert has_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(["aab"]) == [[1, 3]]
    assert tokenizer.end == 0
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(["aab"]) == [[1, 3]]


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_tokenizer(tmp_path / "nothing")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"there is no tokenizer\.json in it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is damaged, or is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_without_tokenizers_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r'pip install "echelon\[data\]"'):
        load_tokenizer(tmp_path)
