"""The contenders of the bench of split layers: what goes in, and what the table says of blocks."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn

from benchmarks import layers, tensor
from echelon.launching import Ranks
from echelon.models import ModelConfig


def hidden_states(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Runs in a rank: whole sequences, and this rank's part of them."""
    return layers.make_hidden(config, 3, sequence=False), layers.make_hidden(config, 3, sequence=True)


def test_parts_of_sequences_make_the_whole(warm_ranks: Callable[[int], Ranks]) -> None:
    config = tensor._SMALL[0]
    (expected, first), (same, second) = warm_ranks(2).run(hidden_states, config)
    assert expected.shape == (3, config.sequence, config.width)
    assert torch.equal(expected, same)
    assert torch.equal(torch.cat([first, second], dim=1), expected)


@pytest.mark.parametrize("config", tensor._SMALL, ids=lambda config: config.family)
def test_the_table_has_every_matrix_of_a_block_and_nothing_else(config: ModelConfig) -> None:
    blocks = layers._blocks(config)
    table = layers._table(blocks)
    names = [name for name, module in blocks.named_modules() if isinstance(module, nn.Linear)]
    assert names
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern in table), name
    everything = [name for name, _ in blocks.named_modules()]
    assert all(any(fnmatchcase(name, pattern) for name in everything) for pattern in table)
