"""Exit codes and messages: never a traceback for a user's mistake, all errors at once, pure JSON."""

import io
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from echelon import __version__
from echelon.cli.main import make_robust
from echelon.models import presets
from tests.cli.commands import SMALL, output

ROOT = Path(__file__).resolve().parent.parent.parent


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--version") == (0, f"echelon {__version__}\n", "")
    code, out, _ = output(capsys, "train", "--help")
    assert code == 0
    assert "--plan" in out


@pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], ["verify", "--steps", "x"]])
def test_bad_usage_is_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = output(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_errors_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--plan", "data=0 tensor=x zero=7 schedule=zigzag")
    assert code == 2
    assert all(word in err for word in ("data=0", "tensor=x", "zero=7", "schedule=zigzag"))


def test_a_plan_that_the_model_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--plan", "data=2 expert=2")
    assert code == 2
    assert "has no experts that ranks can share out" in err
    assert "Traceback" not in err


def test_verify_counts_the_ranks_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--plan", "data=99999")
    assert code == 2
    assert "torchrun" in err


def test_verify_passes_and_finds_an_injected_bug(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "verify", "--plan", "data=2", "--steps", "3", "--json", *SMALL)
    verdict = json.loads(out)
    assert (code, verdict["equal"], err) == (0, True, "")
    assert verdict["worst"]["error"] <= 1e-9
    code, out, _ = output(
        capsys, "verify", "--plan", "data=2", "--steps=3", "--inject-bug=divide-twice", *SMALL
    )
    assert code == 1
    assert "DIFFERS" in out
    assert re.search(r"worst (?:tensor )?is (blocks|embedding|head|norm)\S*weight", " ".join(out.split())), (
        out
    )


def test_verify_does_not_run_under_torchrun_and_rank_0_alone_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "verify starts its own ranks: run it without torchrun"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, out, _ = output(capsys, "verify", "--json")
    assert (code, json.loads(out)) == (2, {"error": says, "errors": [], "exit_code": 2})
    monkeypatch.setenv("RANK", "1")
    assert output(capsys, "verify", "--json") == (2, "", f"error on rank 1: {says}\n")


def test_an_unknown_bug_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--inject-bug", "divide-twise")
    assert code == 2
    assert "did you mean 'divide-twice'?" in err


def test_the_wheel_names_no_package_host_as_its_home() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not any("pypi" in url for url in project.get("urls", {}).values())


def test_the_help_of_train_lists_presets_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output(capsys, "train", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert all(name in text for name in (*presets(), "adamw", "cosine", "microbatches", "pipeline"))


def printed(text: str, encoding: str) -> bytes:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    make_robust(stream)
    stream.write(text)
    stream.flush()
    return stream.buffer.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_ascii_has_words_for_our_signs() -> None:
    assert printed("… 1 → 2 ✓ ▁█", "ascii") == b"... 1 -> 2 ok .#"
    assert printed("ü 日", "ascii") == rb"\xfc \u65e5"
    assert printed("ü … 日", "latin-1") == b"\xfc ... \\u65e5"


def test_utf8_is_left_alone_but_for_broken_names() -> None:
    assert printed("… ✓", "utf-8") == "… ✓".encode()
    assert printed("\udcff", "utf-8") == rb"\udcff"


def test_what_is_no_such_stream_is_left_alone() -> None:
    make_robust(io.StringIO(), None)
    assert sys.stdout is not None
