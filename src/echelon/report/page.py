"""One self-contained HTML page: the data, the script that draws them, and uPlot for the curves.

But for its title, the page has no text of a run in its markup. All of it is JSON in a script of a type that
no browser runs, with `<`, `>` and `&` escaped, so that no name can end it; app.js writes texts as texts.
"""

import html
from importlib import resources
from pathlib import Path
from typing import Any

from echelon.errors import printable
from echelon.report.contents import contents, differences
from echelon.report.foresight import foresee
from echelon.report.run_files import read_run
from echelon.train import strict_json

MOST_BYTES = 2 * 10**6
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# No network, whatever a run is called: the page may only run what stands in it.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def gather(paths: list[Path], *, predict: bool = True) -> dict[str, Any]:
    """The data of a page of one run, or of several side by side."""
    runs = []
    for path in paths:
        files = read_run(path)
        runs.append(contents(files, foresee(files) if predict else {}))
    return {"runs": runs, "differences": differences(runs) if len(runs) > 1 else [], "live": False}


def render(data: dict[str, Any]) -> str:
    """The page of some data. `live`: it asks the server that sent it for newer ones."""
    policy = _POLICY + ("; connect-src 'self'" if data.get("live") else "")
    title = ", ".join(run["name"] for run in data["runs"])
    return _asset("page.html").format(
        policy=policy,
        title=html.escape(printable(f"{title} · echelon")),
        style=_asset("uPlot.min.css") + _asset("style.css"),
        data=in_script(data),
        library=_asset("uPlot.iife.min.js"),
        script=_asset("app.js"),
    )


def in_script(data: dict[str, Any]) -> str:
    """JSON that can stand in a script element."""
    text = strict_json.dump(data)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return resources.files("echelon.report").joinpath("assets", name).read_text(encoding="utf-8")
