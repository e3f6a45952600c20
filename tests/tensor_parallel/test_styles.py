"""Tables: which style a name has, which numbers a pattern matches, and which lines match nothing."""

import pytest
from torch import nn

from echelon.errors import UserError
from echelon.tensor_parallel import TABLES
from echelon.tensor_parallel.styles import MODULE_WORDS, NUMBER_WORDS, Style, Styles


class GPT(nn.Module):
    """Has the name of a class that a table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp_norm": nn.LayerNorm(4)}), nn.Linear(4, 4)])
        self.config = nn.Linear(6, 6)  # stands for any object with numbers


def test_words_are_read_and_printed() -> None:
    for text in (*MODULE_WORDS, *NUMBER_WORDS, "column/3"):
        assert str(Style.read("x", text)) == text
    assert Style.read("x", "column/3") == Style("column", 3)
    assert str(Style.read("x", "column/1")) == "column"


@pytest.mark.parametrize("text", ["rows", "row/2", "", "Column", "columns/3"])
def test_other_words_are_refused_with_all_that_there_are(text: str) -> None:
    with pytest.raises(UserError, match=r"'a\.b': '.*' in the table must be one of column, row, .*divisible"):
        Style.read("a.b", text)


def test_every_word_of_the_known_tables_can_be_read() -> None:
    for table in TABLES.values():
        assert all(Style.read(pattern, text) for pattern, text in table.items())


def test_the_users_table_comes_before_that_of_the_class() -> None:
    model = GPT()
    assert Styles(model, None).of("blocks.0.mlp_norm") == Style("replicated")
    assert Styles(model, {"blocks.*": "inner"}).of("blocks.0.mlp_norm") == Style("inner")
    assert Styles(model, None).of("blocks.1") is None


def test_the_first_pattern_that_matches_counts_and_a_star_matches_dots() -> None:
    styles = Styles(nn.Linear(1, 1), {"a.*.c": "row", "a.*": "column"})
    assert styles.of("a.b.b.c") == Style("row")
    assert styles.of("a.b.d") == Style("column")
    assert styles.of("b") is None


def test_a_word_for_numbers_is_no_style_of_a_module() -> None:
    styles = Styles(nn.Linear(1, 1), {"a": "divided", "*": "row"})
    assert styles.of("a") == Style("row")


def test_numbers_are_found_in_modules_and_in_the_config() -> None:
    divided = {"blocks.1.in_features": "divided", "*.in_features": "divided"}
    styles = Styles(GPT(), divided | {"config.out_features": "divisible"})
    assert [(name, attribute) for name, _, attribute in styles.numbers("divided")] == [
        ("blocks.1.in_features", "in_features"),
        ("config.in_features", "in_features"),
    ]
    owners = {name: owner for name, owner, _ in styles.numbers("divisible")}
    assert owners["config.out_features"].out_features == 6


def test_only_lines_of_the_user_can_be_unused() -> None:
    table = {"blocks.*": "inner", "layers.*": "row", "blocks.1.heads": "divided", "config.heads": "divisible"}
    unused = Styles(GPT(), table).unused()
    assert unused == [
        ("layers.*", Style("row")),
        ("blocks.1.heads", Style("divided")),
        ("config.heads", Style("divisible")),
    ]
