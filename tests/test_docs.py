"""The documentation is true: links, numbers, pictures, tables, commands, and an example that runs."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from benchmarks import benches
from echelon.cli.main import app, run
from echelon.engine import Engine, parallelize
from echelon.launching import Ranks
from echelon.models import build as build_model
from echelon.models import cross_entropy, preset, presets
from echelon.nn.huggingface.families import ENCODERS, FAMILIES
from echelon.nn.huggingface.layers import LayerInputs
from echelon.nn.huggingface.tensor_tables import TENSOR_TABLES
from echelon.plan import SCHEDULES, Plan
from echelon.program import Op, build, load_schedule, show
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_file import read_job
from echelon.verify.inject_bug import BUGS
from tests.test_structure import statements

ROOT = Path(__file__).resolve().parent.parent


def load_module(path: Path) -> ModuleType:
    """A script that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_module(ROOT / "docs" / "generate.py")
PAGES: list[Path] = generate.pages()
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
SYSTEMS = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ARGUMENTS = "argument of `parallelize`"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language; "" for those that name none."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for named, body in fences if named == language]


def table(text: str, first_head: str) -> list[list[str]]:
    """The rows of the table whose first heading is `first_head`."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(f"| {first_head} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


# --- what is shown exists, and is what the script makes -----------------------------------------------


@by_page
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} points to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} points to {target}"


@by_page
def test_a_page_opens_with_a_snippet(page: Path) -> None:
    opening, *_ = page.read_text(encoding="utf-8").split("\n## ")
    assert page.name == "CHANGELOG.md" or "```" in opening


@by_page
def test_tables_of_numbers_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.with_results(text) == text, "run: python docs/generate.py"


def test_the_benchmark_page_is_made_of_all_results() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- benches: (\w+) -->", text) == ["overview", "sections"]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in generate.RESULTS.glob("*.json")]
    assert text.count("\n### ") == sum(record["name"] in benches() for record in records)


def test_pictures_are_those_of_the_script() -> None:
    for name, picture in generate.pictures().items():
        drawn = (generate.PICTURES / name).read_text(encoding="utf-8")
        assert drawn == picture, f"{name}: run python docs/generate.py"
    assert (generate.PICTURES / "loss.svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_matrix_has_a_table_by_group_and_numbered_reasons() -> None:
    def cell(model: str, ranks: int, result: str, text: str = "") -> dict[str, Any]:
        return {
            "model": model,
            "group": "G",
            "word": "zero=1",
            "ranks": ranks,
            "result": result,
            "text": text,
        }

    origin = {"command": "c", "date": "2026-01-01", "versions": {"torch": "2"}, "rows": []}
    hardware = {"cores": 2, "cpu": "x", "gpus": []}
    cells = [cell("a", 1, "equal"), cell("a", 2, "refused", "LlamaForCausalLM is long; cut it")]
    cells += [cell("b", 1, "equal"), cell("b", 2, "equal")]
    text = generate._matrix({**origin, "hardware": hardware, "cells": cells})
    assert "**G**\n\n| model | `zero=1` |" in text
    assert "| a | 1: equal; 2: refused (1) |\n| b | equal |\n\n1. the model is long\n" in text


def test_a_table_has_a_line_for_each_row_and_shows_no_zeros() -> None:
    origin = {"command": "c", "date": "2026-01-01", "versions": {"torch": "2"}}
    hardware = {"cores": 2, "cpu": "x", "gpus": []}
    table = [{"plan": "`data=2`", "data_bytes": 2048}, {"plan": "`tensor=2`", "data_bytes": 0}]
    text = generate._rows({**origin, "hardware": hardware, "table": table})
    assert "| plan | data |\n| --- | ---: |\n| `data=2` | 2.0 KiB |\n| `tensor=2` |  |\n" in text


def test_a_region_of_results_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {
        "command": "python -m tests.toy",
        "date": "2030-01-01T00:00:00+00:00",
        "versions": {"torch": "9"},
        "hardware": {"cores": 2, "cpu": "Some CPU", "gpus": []},
        "settings": {"passed": 3, "peak_bytes": 2048},
    }
    (tmp_path / "toy.json").write_text(json.dumps(result))
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    text = generate.with_results("a\n<!-- results: toy -->\nold\n<!-- end results -->\nz\n")
    assert "| passed | peak |\n| --- | --- |\n| 3 | 2.0 KiB |\n" in text
    assert "*`python -m tests.toy`. 2 cores of Some CPU, torch 9, 2030-01-01.*\n" in text
    assert "old" not in text
    assert generate.with_results(text) == text


# --- what the pages say is true -----------------------------------------------------------------------


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 120
    assert "](docs/index.md)" in README
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w-]+\.md)", index)
    assert sorted([*linked, "index.md"]) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_page_for_programs_leads_to_pages_that_are_there() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# echelon\n\n> ")
    links = re.findall(r"^- \[[^\]]+\]\(([\w/.-]+)\)", text, re.MULTILINE)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    (example,) = (block for block in blocks(README, "python") if "__main__" in block)
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.fullmatch(r"loss (\S+) -> (\S+)\n", done.stdout).groups())  # type: ignore[union-attr]
    assert last < first / 10


def test_the_arguments_of_parallelize_and_their_defaults_are_documented() -> None:
    documented = [(name.strip("`"), default.strip("`")) for name, default, _ in table(REFERENCE, ARGUMENTS)]
    parameters = inspect.signature(parallelize).parameters.values()
    required = inspect.Parameter.empty
    assert documented == [
        (p.name, "required" if p.default is required else repr(p.default)) for p in parameters
    ]


def test_the_members_of_an_engine_are_documented() -> None:
    cells = " ".join(names for names, _ in table(REFERENCE, "of an `engine`"))
    documented = set(re.findall(r"`(\w+)", cells))
    public = {name for name in dir(Engine) if not name.startswith("_")}
    assert documented <= public
    assert public - documented == {"plan", "boundaries", "learning_rate", "optimizer"}


@by_page
def test_python_in_the_pages_is_python(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        ast.parse(block)


def test_the_commands_of_the_reference_are_those_of_the_command_line() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    documented = {}
    for usage, _ in table(REFERENCE, "command"):
        name = usage.split()[1].strip("`")
        documented[name] = set(re.findall(r"--[a-z-]+", usage))
    assert documented.keys() == commands.keys()
    for name, options in documented.items():
        of_group = getattr(commands[name], "commands", {name: commands[name]})  # checkpoint show
        known = {opt for each in of_group.values() for parameter in each.params for opt in parameter.opts}
        assert options <= known, name
        assert "--json" in known, name


def test_the_reference_names_every_bench() -> None:
    (names,) = re.findall(r"`python -m benchmarks [^`]*` with one of\n(.*)", REFERENCE)
    assert re.findall(r"`([\w-]+)`", names) == list(benches())


def test_the_exit_codes_of_the_reference_are_those_of_the_command() -> None:
    source = (ROOT / "src" / "echelon" / "cli" / "main.py").read_text(encoding="utf-8")
    codes = re.findall(r"(?:^| · )(\d+) ", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE)
    assert [code for code, _ in table(REFERENCE, "exit code")] == codes


def test_the_injected_bugs_are_documented() -> None:
    page = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    assert [name.strip("`") for name, *_ in table(page, "`--inject-bug`")] == list(BUGS)


def test_the_targets_of_make_are_documented() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    documented = [target.strip("`").removeprefix("make ") for target, _ in table(page, "target")]
    assert documented == [target for target in phony.split() if target != "help"]


def describe_engine(plan: str) -> str:
    optimizer = torch.optim.AdamW
    with parallelize(
        build_model(preset("gpt-tiny")), plan, optimizer=optimizer, loss=cross_entropy
    ) as engine:
        return repr(engine)


def test_the_engine_that_is_printed_on_the_page_of_architecture_is_printed_so(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    printed, *_ = blocks(ARCHITECTURE, "text")
    (plan,) = re.findall(r"'(.*)'", printed)
    assert warm_ranks(4).run(describe_engine, plan)[0] + "\n" == printed


def test_the_page_of_architecture_names_every_package() -> None:
    named = {name for names, _ in table(ARCHITECTURE, "package") for name in re.findall(r"`(\w+)`", names)}
    assert named == {name for layer in (*generate.LAYERS, generate.BESIDE) for name in layer.packages}


def test_the_names_of_the_stage_are_in_the_files_that_the_page_of_architecture_says() -> None:
    rows = table(ARCHITECTURE, "name")
    assert len(rows) > 5
    for name, _, file in rows:
        source = (ROOT / "src" / "echelon" / file.strip("`")).read_text(encoding="utf-8")
        assert f"class {name.strip('`')}(" in source or f"class {name.strip('`')}:" in source


def test_the_files_of_the_tree_exist() -> None:
    (tree,) = blocks(ARCHITECTURE, "")
    package = ROOT / "src" / "echelon"
    named = re.findall(r"^ +([\w/]+(?:\.py|/))", tree, re.MULTILINE)
    assert len(named) > 15
    for name in named:
        assert (package / name).exists() or (package / "parallel" / "data" / name).exists(), name
    files = {path.name for path in (package / "parallel" / "data").glob("[a-z]*.py")}
    assert {name for name in files if name not in tree} == set()


def test_the_plan_lines_of_the_systems_are_plans_and_those_that_work_run() -> None:
    rows = [row for row in table(SYSTEMS, "system") if not row[0].startswith("**")]
    assert len(rows) > 40
    assert {state for *_, state in rows} <= {"works", "planned"}
    plans = {line.strip("`"): state for _, line, state in rows if re.fullmatch(r"`[a-z]+=[^`]*`", line)}
    assert len(plans) > 20
    for line in plans:
        Plan.parse(line)


def test_the_line_that_the_readme_explains_takes_eight_ranks() -> None:
    (line,) = blocks(README, "")
    assert Plan.parse(line).ranks == 8


PIPELINE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", blocks(PIPELINE, "schedule"))
def test_the_schedule_files_of_the_page_are_schedules(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    load_schedule(path)


def test_what_the_page_of_pipelines_shows_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen, program, error = blocks(PIPELINE, "text")
    assert show(build("1f1b", (1, 1), 2)) == program
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["schedule", "1f1b", "--stages", "4", "--microbatches", "8"]) == 0
    assert capsys.readouterr().out == screen
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("rank 0: F0 B0 F1 B1\nrank 1: F0 F1 B0 B1\n")
    assert run(["schedule", "mine.txt"]) == 2
    assert capsys.readouterr().err == error


def test_every_instruction_of_a_program_is_in_the_table() -> None:
    words = " ".join(row[0] + row[1] for row in table(PIPELINE, "instruction"))
    listed = re.findall(r"`([A-Z]+)\d*[<>]?\d*`", words)
    assert sorted(listed) == sorted(op.value for op in Op)


def test_every_schedule_and_every_option_of_the_command_is_documented() -> None:
    assert [name.strip("`") for name, *_ in table(PIPELINE, "schedule")] == list(SCHEDULES)
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {option for parameter in commands["schedule"].params for option in parameter.opts}
    options = {option for row in table(PIPELINE, "option") for option in re.findall(r"--[a-z-]+", row[0])}
    assert options == known - {"name", "--help"}


def keys_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from keys_of(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, inner


def test_every_key_of_a_job_and_its_default_is_documented() -> None:
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    documented = {key.strip("`"): default for key, default, _ in table(page, "key")}
    shown = {key: "–" if value is None else f"`{json.dumps(value)}`" for key, value in keys_of(Job())}
    assert documented == shown
    assert set(presets()) <= set(re.findall(r"`([\w.-]+)`", page))


def test_the_job_file_of_the_page_is_a_job(tmp_path: Path) -> None:
    (text,) = blocks((ROOT / "docs" / "train.md").read_text(encoding="utf-8"), "toml")
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert read_job(path).steps == tomllib.loads(text)["steps"]


def test_every_field_of_a_plan_is_documented_with_its_default() -> None:
    rows = table((ROOT / "docs" / "plan.md").read_text(encoding="utf-8"), "field")
    defaults = {field.name: field.default for field in dataclasses.fields(Plan)}
    shown = {name: "none" if value == () else str(value).lower() for name, value in defaults.items()}
    assert {row[0].strip("`"): row[3].strip("`") for row in rows} == shown
    for field, _, values, *_ in rows:
        for value in re.findall(r"`([\w,-]+)`", values) or ["1", "2"]:
            needed = {"`expert`": " data=2", "`chunks`": " pipeline=2 microbatches=2 schedule=interleaved"}
            needed["`sequence`"] = " tensor=2"
            needed["`shard`"] = " data=4 zero=1"
            needed["`attention`"] = " context=2"
            needed["`gradients`"] = " precision=bf16"
            needed["`checkpoints`"] = " tensor=2 recompute=full" * (value == "split")
            needed["`contiguous`"] = " recompute=full"
            needed["`masters`"] = " precision=bf16"
            needed["`delay`"] = " offload=optimizer"
            needed["`schedule`"] = " pipeline=2 microbatches=2 chunks=2" * (value == "interleaved")
            if (field, value) == ("`chunks`", "1"):  # the interleaved schedule has several
                continue
            Plan.parse(f"{field.strip('`')}={value}" + needed.get(field, ""))


def imports(package: Path) -> Iterator[tuple[Path, str]]:
    """Each file of a package, or the module, with each other package of echelon that it imports."""
    for file in package.rglob("*.py") if package.is_dir() else [package.with_suffix(".py")]:
        for node in statements(ast.parse(file.read_bytes())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name is not None and name.startswith("echelon.") and name.split(".")[1] != package.name:
                    yield file, name.split(".")[1]


def test_the_families_of_transformers_are_documented() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {name.strip("`"): row[2:] for row in table(page, "class") for name in row[0].split()}
    by_view = {name for name, family in FAMILIES.items() if family.inputs is LayerInputs}
    expected = {
        name: [True, name in FAMILIES or name in ENCODERS, name in FAMILIES, name in by_view]
        for name in TENSOR_TABLES.keys() - {"VisionTransformer"}  # which is timm's
    }
    assert {name: [column == "yes" for column in columns] for name, columns in rows.items()} == expected


def test_imports_point_downward_as_the_picture_shows() -> None:
    level = {name: index for index, layer in enumerate(generate.LAYERS) for name in layer.packages}
    lowest_user_of_beside = level["train"]
    for package in [*level, *generate.BESIDE.packages]:
        for file, imported in imports(ROOT / "src" / "echelon" / package):
            if package in generate.BESIDE.packages:
                assert imported in ("errors", "hardware", "nn", "quantities", "state"), (
                    f"{file.name} imports {imported}"
                )
            elif imported in generate.BESIDE.packages:
                # Sizes of models are plain data, which the planner reads too.
                assert level[package] <= lowest_user_of_beside or package == "planner", (
                    f"{file.name} imports {imported}"
                )
            else:
                assert level[package] < level[imported], f"{file.name} of {package} imports {imported}"
    existing = {
        path.stem for path in (ROOT / "src" / "echelon").iterdir() if not path.name.startswith(("_", "py"))
    }
    public_names = {
        "experts",
        "integrations",
        "optim",
        "sequence",
    }  # of modules in rooms: tests/test_public_names.py
    assert existing - public_names == level.keys() | set(generate.BESIDE.packages)


def _defined(path: Path) -> set[str]:
    """Classes, functions and methods of a file: {"Step", "Step.train", …}."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            names |= {node.name, *(f"{node.name}.{each.name}" for each in functions)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_the_walk_through_a_step_names_what_is_there() -> None:
    page = (ROOT / "docs" / "a-step.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)\)", page)
    assert len(links) > 15
    assert [(name, path) for name, path in links if name not in _defined(ROOT / path)] == []


def test_a_step_is_read_in_one_file_of_a_few_screens() -> None:
    step = (ROOT / "src/echelon/engine/step/step.py").read_text(encoding="utf-8")
    assert len(step.splitlines()) <= 250
