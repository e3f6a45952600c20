"""The site of the documentation: it builds without a warning, where mkdocs-material is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, load_module


def test_links_out_of_the_documentation_are_shown_as_text() -> None:
    hook = load_module(ROOT / "docs" / "site_links.py")
    text = "See [the step](../src/a.py), [a page](b.md#c) and [all](../CHANGELOG.md)."
    assert hook.on_page_markdown(text, page=None) == "See the step, [a page](b.md#c) and all."


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "start" / "index.html").is_file()
