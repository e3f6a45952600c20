"""The page as a file: self-contained, small, and no text of a run is ever a part of its markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from echelon.report.page import MOST_BYTES, gather, in_script, render
from tests.report.folders import write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028&lt;\ud800"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(page)
    return parser.found


def hostile_run(path: Path) -> Path:
    return write_run(
        path,
        name="<img src=x onerror=alert(1)>",
        plan=HOSTILE,
        state=HOSTILE,
        reason=HOSTILE,
        job={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        events=[{"kind": HOSTILE, "reason": HOSTILE, "time": HOSTILE}],
    )


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = render(gather([write_run(tmp_path)], predict=False))
    assert len(page.encode()) < MOST_BYTES
    tags = elements(page)
    assert not [attributes for _, attributes in tags if {"src", "href"} & attributes.keys()]
    (policy,) = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "connect-src 'self'" in render({"runs": [], "differences": [], "live": True})


def test_hostile_names_are_text(tmp_path: Path) -> None:
    data = gather([hostile_run(tmp_path)], predict=False)
    page = render(data)
    plain = render(gather([write_run(tmp_path / "plain")], predict=False))
    assert [tag for tag, _ in elements(page)] == [tag for tag, _ in elements(plain)]
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(text)["runs"][0]["plan"] == data["runs"][0]["plan"] == HOSTILE
    assert not {"<", ">", "&", "\u2028"} & set(in_script(data))
    page.encode()


def test_the_script_writes_no_html() -> None:
    script = Path(__file__).parents[2] / "src" / "echelon" / "report" / "assets" / "app.js"
    text = script.read_text(encoding="utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert way not in text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_runs_are_compared(count: int, tmp_path: Path) -> None:
    data = gather([write_run(tmp_path, name=f"run-{n}", steps=10 + n) for n in range(count)], predict=False)
    assert [run["name"] for run in data["runs"]] == [f"run-{n}" for n in range(count)]
    assert bool(data["differences"]) == (count > 1)
