"""What the site has beside the pages of docs/: a front page, navigation, and the API from docstrings.

The front page is the README, the navigation is the list of docs/index.md, and each module of MODULES has
a page that mkdocstrings fills: nothing of this is written twice.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # files of the root that are pages of the site

# Public module → the file whose `__all__` lists its names, below src/echelon.
MODULES = {
    "echelon": "__init__.py",
    "echelon.data": "data/__init__.py",
    "echelon.optim": "update/optim/__init__.py",
    "echelon.experts": "nn/experts/__init__.py",
    "echelon.integrations": "train/integrations/__init__.py",
    "echelon.sequence": "nn/sequence.py",
    "echelon.models": "models/__init__.py",
    "echelon.verify": "verify/__init__.py",
    "echelon.planner": "planner/__init__.py",
    "echelon.program": "program/__init__.py",
    "echelon.collectives": "collectives/__init__.py",
    "echelon.launching": "launching/__init__.py",
}
FIRST = ("parallelize", "launch", "Plan", "Engine", "Metrics")  # what a reader looks up most
# Of single names: how they are shown, where it is not as most are.
_SIGNATURE = "merge_init_into_class: false"
_FIELDS = "show_if_no_docstring: true"
OPTIONS = {
    "echelon.Plan": _SIGNATURE,  # its fields are those of docs/plan.md
    "echelon.Engine": f"{_SIGNATURE}, members_order: alphabetical",  # parallelize makes it
    "echelon.Metrics": f"{_SIGNATURE}, {_FIELDS}",
    "echelon.Evaluation": _FIELDS,
    "echelon.Memory": _FIELDS,
    "echelon.verify.Verdict": _FIELDS,
    "echelon.verify.LowPrecisionVerdict": _FIELDS,
}
# Names that are those of a file too, for which they would be taken.
HOMES = {"echelon.dry_run": "echelon.engine.dry_run.dry_run.dry_run"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the sections of docs/index.md."""
    sections = re.findall(r"^## (.+)\n\n((?:- .+\n)+)", INDEX, re.MULTILINE)
    nav: list[Any] = [{"echelon": "index.md"}]
    for title, links in sections:
        nav.append({title: [{text: page} for text, page in re.findall(r"\[(.+)\]\((\S+)\)", links)]})
    nav[-1]["Reference"].append({"API": [f"api/{module}.md" for module in MODULES]})
    nav.append({"Project": list(BESIDE)})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for name in BESIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_from_the_root(text)))
    for module, source in MODULES.items():
        path = ROOT / "src" / "echelon" / source
        files.append(File.generated(config, f"api/{module}.md", content=api_page(module, path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the README as the front page; give links the titles of pages; show other files' names as text."""
    if page.file.src_uri == "index.md":
        markdown = _from_the_root((ROOT / "README.md").read_text(encoding="utf-8"))
    markdown = re.sub(rf"\]\(\.\./({'|'.join(BESIDE)})", r"](\1", markdown)
    markdown = re.sub(r"\[[^\]]+\.md\]\(([\w-]+\.md)", lambda link: f"[{title(link[1])}]({link[1]}", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)\s]+\)", r"\1", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make links of the pages that docstrings name."""
    if not page.file.src_uri.startswith("api/"):
        return html
    return re.sub(r"\bdocs/([\w-]+)\.md", r'<a href="../../\1/">the page \1</a>', html)


def _from_the_root(markdown: str) -> str:
    """Make the links of a file beside docs/ those of a page in it."""

    def moved(link: re.Match[str]) -> str:
        target = link[1]
        if target.startswith(("https://", "#", *BESIDE)):
            return link[0]
        return f"]({target.removeprefix('docs/')})" if target.startswith("docs/") else f"](../{target})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, markdown)


def title(name: str) -> str:
    """The title of a page, to its colon."""
    path = DOCS / name if (DOCS / name).exists() else ROOT / name
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("# ").partition(":")[0]


def api_page(module: str, path: Path) -> str:
    """One page: what the module is for, then each of its public names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = [f"# {module}", ast.get_docstring(tree) or ""]
    for name in public_names(tree):
        full = f"{module}.{name}"
        if full in MODULES:
            parts.append(f"## [{full}]({full}.md)")
            continue
        home = HOMES.get(full, f"{full}.{name}" if (path.parent / f"{name}.py").exists() else full)
        options = [f"heading: {full}", f"toc_label: {name}", OPTIONS.get(full, "")]
        parts.append(f"::: {home}\n    options: {{{', '.join(filter(None, options))}}}")
    return "\n\n".join(parts) + "\n"


def public_names(tree: ast.Module) -> list[str]:
    """The names of `__all__`, or else what is defined: what is looked up most first, constants last."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            if name == "__all__":
                names = ast.literal_eval(node.value)
                break
            names += [name] * name.isupper()
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
    names = [name for name in names if not name.startswith("_")]
    rank = {name: index for index, name in enumerate(FIRST)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name.isupper() and len(name) > 3))
