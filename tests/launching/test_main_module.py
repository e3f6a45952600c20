import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from echelon.launching.main_module import hidden_main_file, is_main_importable


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"__file__": __file__}, True),  # python script.py
        ({"__spec__": SimpleNamespace(name="package.module")}, True),  # python -m
        ({}, False),  # python -c, and the REPL
        ({"__file__": "<stdin>"}, False),  # python - < script.py
        ({"__file__": __file__, "__spec__": SimpleNamespace(name="_pyrepl.__main__")}, False),  # of 3.13
    ],
)
def test_ranks_import_a_main_module_that_is_a_file(
    attributes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_main(attributes, monkeypatch)
    assert is_main_importable() is expected


def test_a_notebook_is_not_imported_even_if_an_editor_gives_it_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_main({"__file__": __file__, "get_ipython": print}, monkeypatch)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert is_main_importable()  # ipython script.py
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert not is_main_importable()


@pytest.mark.parametrize(("file", "expected"), [("<stdin>", None), (__file__, __file__)])
def test_a_file_that_is_none_is_hidden_while_ranks_start(
    file: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = replace_main({"__file__": file}, monkeypatch)
    with hidden_main_file():
        assert getattr(main, "__file__", None) == expected
    assert main.__file__ == file


def replace_main(attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(attributes)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main
