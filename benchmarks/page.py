"""The results of all benches as Markdown, for docs/benchmarks.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.catalog import benches
from benchmarks.compare import Row
from benchmarks.result import Result, read
from benchmarks.sources import SUBJECTS, are_current
from benchmarks.targets import targets_of
from echelon.quantities import heading, show_figure, show_seconds

_FOLDER = Path(__file__).parent / "results"
_TEXT = ("bench", "measured on", "date", "sources", "case", "contender", "target")  # columns of no numbers


class Kept(NamedTuple):
    """A result in its file, NAME.json; of parts of a bench there are files with other names."""

    title: str
    result: Result

    @property
    def link(self) -> str:
        return f"[{self.title}](#{self.title})"


def overview(folder: Path = _FOLDER) -> str:
    """Where and when each bench was measured, how many of its targets it meets, and whether it is stale."""
    lines = [["bench", "measured on", "date", "targets met", "sources"]]
    lines += [_summary(kept) for name in benches() for kept in _results(folder, name)]
    lines += [[f"`{name}`", "", "not measured", "", ""] for name in benches() if not _results(folder, name)]
    return f"\n{_table(lines)}\n"


def sections(folder: Path = _FOLDER) -> str:
    """Every row of every result."""
    return "\n" + "".join(_section(kept) for name in benches() for kept in _results(folder, name))


def _results(folder: Path, name: str) -> list[Kept]:
    """The results of a bench, first the one with its name."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != name, path.stem))
    kept = (Kept(path.stem, read(path)) for path in paths if path.stem.startswith(name))
    return [each for each in kept if each.result.name == name]


def _summary(kept: Kept) -> list[str]:
    result = kept.result
    verdicts = [target.is_met(row) for row in result.rows for target in targets_of(result.name, row)]
    met = f"{sum(verdicts)} of {len(verdicts)}" if verdicts else ""
    return [
        kept.link,
        _machine(result),
        result.date[:10],
        met,
        "as measured" if are_current(result.sources) else "**stale**",
    ]


def _section(kept: Kept) -> str:
    result = kept.result
    what = str(benches()[result.name].__doc__).partition("\n")[0]
    explained = f"[Explained]({SUBJECTS[result.name].page})"
    held = dict.fromkeys(target.source for row in result.rows for target in targets_of(result.name, row))
    notes = [
        *(f"`{package}` was not installed." for package in result.settings.get("not_installed", ())),
        *result.settings.get("remarks", ()),
        f"Targets: {'; '.join(held)}." if held else "",
        "" if are_current(result.sources) else "**Stale**: older than the code that it measures.",
    ]
    parts = [f"### {kept.title}", f"{what} {explained}.", _rows_table(result)[:-1], _origin(result)]
    return "".join(f"{part}\n\n" for part in [*parts, *notes] if part)


def figures(name: str, folder: Path = _FOLDER) -> str:
    """The rows of one result, for the page that explains it."""
    result = read(folder / f"{name}.json")
    return f"\n{_rows_table(result)}\n{_origin(result)}\n\n"


def _rows_table(result: Result) -> str:
    extras = list(dict.fromkeys(extra for row in result.rows for extra in row.extras))
    lines = [["case", "contender", "time", "ratio to baseline", *map(heading, extras), "target"]]
    lines += [_cells(result.name, row, extras) for row in result.rows]
    return _table(lines if any(line[-1] for line in lines[1:]) else [line[:-1] for line in lines])


def _cells(name: str, row: Row, extras: Sequence[str]) -> list[str]:
    seconds, ratio = row.seconds, row.ratio
    time = show_seconds(seconds.median)
    if seconds.low != seconds.high:
        time += f" ({show_seconds(seconds.low)} … {show_seconds(seconds.high)})"
    spread = f"{ratio.median:.2f} ({ratio.low:.2f} … {ratio.high:.2f})"
    return [
        row.case,
        row.contender,
        time,
        "baseline" if row.contender == row.baseline else spread,
        *(show_figure(extra, row.extras[extra]) if extra in row.extras else "" for extra in extras),
        "; ".join(
            f"{target.show(row)}: {'met' if target.is_met(row) else '**missed**'}"
            for target in targets_of(name, row)
        ),
    ]


def _origin(result: Result) -> str:
    command = result.command.replace("echelon bench", "python -m benchmarks")  # its name in earlier versions
    versions = ", ".join(f"{name} {result.versions[name]}" for name in ("torch", "python"))
    commit = "unknown" if result.commit is None else f"`{result.commit[:8]}`"
    changes = " and changes" if result.commit and result.commit.endswith("-dirty") else ""
    return f"*`{command}`: {_machine(result)}, {versions}, commit {commit}{changes}, {result.date[:10]}.*"


def _machine(result: Result) -> str:
    hardware = result.hardware
    return ", ".join([*hardware["gpus"], f"{hardware['cores']} cores of {hardware['cpu']}"])


def _table(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if head in _TEXT else "---:" for head in lines[0]]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], rule, *lines[1:]])
