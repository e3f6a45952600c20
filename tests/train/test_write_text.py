"""What a model writes after a prompt: of runs on text and on bytes."""

import json
import sys
from pathlib import Path

import pytest
import torch

from echelon.errors import UserError
from echelon.models import ModelConfig, build, save_hf
from echelon.train.write_text import write_text
from tests.data.tiny_folders import END, NUM_IDS, make_model, make_tokenizer


def byte_model(folder: Path, vocab: int = 256) -> Path:
    save_hf(build(ModelConfig("gpt", 1, 16, 2, vocab, 16)), folder)
    return folder


def test_bytes_go_on_from_a_prompt(tmp_path: Path) -> None:
    byte_model(tmp_path / "run" / "model")
    written = write_text(tmp_path / "run", "def f", tokens=7)
    assert written.text.startswith("def f")
    assert (written.tokens, written.ended, written.folder) == (7, False, tmp_path / "run" / "model")
    assert write_text(tmp_path / "run", "def f", tokens=7).text == written.text
    assert write_text(tmp_path / "run", "def f", tokens=7, seed=1).text != written.text


def test_a_model_with_a_tokenizer_may_end_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path)
    written = write_text(folder, "Hello", tokens=3, temperature=0)
    assert written.text.startswith("Hello")
    ending = torch.tensor([[END]])
    monkeypatch.setattr(sys.modules["echelon.models.transformer"], "_draw", lambda *_: ending)
    written = write_text(folder, "Hello", tokens=9)
    assert (written.text, written.tokens, written.ended) == ("Hello", 1, True)


def test_an_empty_prompt_is_what_stands_before_a_text(tmp_path: Path) -> None:
    assert write_text(make_model(tmp_path / "a"), "", tokens=2).tokens == 2
    byte_model(tmp_path / "b")
    with pytest.raises(UserError, match="the prompt is empty"):
        write_text(tmp_path / "b", "")
    make_tokenizer(byte_model(tmp_path / "c", NUM_IDS), begins=False)
    assert write_text(tmp_path / "c", "", tokens=2).tokens == 2


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        write_text(tmp_path / "nothing", "a")
    with pytest.raises(UserError, match="is no run and no Hugging Face folder"):
        write_text(tmp_path, "a")
    (tmp_path / "run.json").write_text(json.dumps({"state": "running"}))
    with pytest.raises(UserError, match=r"echelon export .* --to hf"):
        write_text(tmp_path, "a")
    with pytest.raises(UserError, match="has no tokenizer, and a vocabulary of 300"):
        write_text(byte_model(tmp_path / "b", 300), "a")
