"""The site of the documentation: it builds without a warning, where mkdocs-material and mkdocstrings are."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import echelon
from tests.test_docs import PAGES, ROOT, load_module

pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install mkdocs-material)")
hook = load_module(ROOT / "docs" / "site_hook.py")


def page(name: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


def test_links_out_of_the_documentation_are_shown_as_text_and_pages_by_their_titles() -> None:
    text = "See [the step](../src/a.py), [plan.md](plan.md#c), [data.md](data.md) and [all](../CHANGELOG.md)."
    shown = "See the step, [Plan](plan.md#c), [Data](data.md) and [all](CHANGELOG.md)."
    assert hook.on_page_markdown(text, page=page("start.md")) == shown


def test_the_front_page_is_the_readme_with_links_into_the_site() -> None:
    shown = hook.on_page_markdown("# All pages", page=page("index.md"))
    assert shown.startswith("# echelon\n")
    assert "](pictures/loss.svg)" in shown
    assert "](docs/" not in shown
    assert "](CONTRIBUTING.md)" in shown


def test_the_navigation_has_every_page_once_in_the_sections_of_the_index() -> None:
    nav = hook.on_config(SimpleNamespace(nav=None)).nav

    def listed(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        return [
            name for each in (value.values() if isinstance(value, dict) else value) for name in listed(each)
        ]

    generated = [f"api/{module}.md" for module in hook.MODULES]
    docs = [path.name for path in PAGES if path.parent == ROOT / "docs"]
    assert sorted(listed(nav)) == sorted([*docs, *generated, *hook.BESIDE])
    assert [title for entry in nav for title in entry][1] == "Start"


def test_the_api_has_every_public_name() -> None:
    text = hook.api_page("echelon", ROOT / "src/echelon/__init__.py")
    shown = {name for name in echelon.__all__ if f"heading: echelon.{name}," in text.replace("}", ",")}
    assert shown | {name for name in echelon.__all__ if f"echelon.{name}" in hook.MODULES} == set(
        echelon.__all__
    )


@pytest.mark.parametrize(
    "module", sorted(hook.MODULES.keys() - {"echelon.integrations"})
)  # of other packages
def test_public_names_have_docstrings(module: str) -> None:
    names = hook.public_names(ast.parse((ROOT / "src/echelon" / hook.MODULES[module]).read_bytes()))
    assert names
    for name in names:
        value = getattr(import_module(module), name)
        if callable(value) and hasattr(value, "__module__") and value.__module__.startswith("echelon"):
            assert value.__doc__, f"{module}.{name} has no docstring"
            assert not value.__doc__.startswith(f"{name}("), (
                f"{module}.{name} has the docstring of a dataclass"
            )


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings-python is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "start" / "index.html").is_file()
    html = (tmp_path / "site" / "api" / "echelon" / "index.html").read_text(encoding="utf-8")
    for name in echelon.__all__:
        assert f"echelon.{name}" in html, name
    assert "bound of the global gradient norm" in html  # of an argument's docstring
