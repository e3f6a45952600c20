"""A Hugging Face folder as the source of a model's weights: any box of any tensor, read by itself."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.state.weight_files.folder_files import read_headers
from echelon.state.weight_files.layout import WeightLayout
from echelon.state.weight_files.pieces import Box, Window, read_pieces
from echelon.state.weight_files.tensor_file import StoredTensor, nbytes, read_box

_SAMPLED_BYTES = 2**10
_COMPARED_BYTES = 2**24  # of two tensors that must be equal, at a time


@final
class WeightFolder:
    """The weights of a model in a folder. Opening it reads the headers of its files, and no weight.

    `layout_of(names)` is the layout of the model's files if they have tensors of these names. `config_errors`
    say why the folder's config is not that of the model.
    """

    def __init__(
        self,
        folder: str | Path,
        layout_of: Callable[[Collection[str]], WeightLayout],
        config_errors: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self._config_errors = list(config_errors)
        self._headers = read_headers(self.folder)
        self._layout = layout_of(self._headers.names)

    def errors(self) -> list[str]:
        """All that is wrong with the files, or with their tensors for this model, from headers.

        Weights are read only where a file holds a tied tensor twice: to compare both.
        """
        headers = self._headers
        if not headers.is_listed:
            return self._config_errors + headers.errors
        errors = (
            self._config_errors + headers.errors + self._layout.errors(headers.tensors, headers.unreadable)
        )
        return errors or [
            f"{name}: differs from {original}, but the model ties them"
            for name, original in self._layout.copies.items()
            if not _is_equal(headers.tensors[name], headers.tensors[original])
        ]

    def check(self) -> None:
        """Raise one error that lists all of them."""
        raise_errors(f"Hugging Face folder '{self.folder}'", self.errors())

    def names(self) -> list[str]:
        """The model's tensors that the files hold, tied ones once; `read` also takes their other names."""
        return list(self._layout.pieces)

    @property
    def ties(self) -> Collection[str]:
        """Further names of tied tensors."""
        return self._layout.ties.keys()

    def describe(self) -> Iterator[str]:
        """A line for each tensor of the files, with a digest of how it begins and ends: by these lines ranks
        see whether their copies of a folder are the same."""
        for name, tensor in sorted(self._headers.tensors.items()):
            yield f"{name} of shape {tensor.shape} and type {tensor.dtype} with values {_sample(tensor)}"

    def read(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """Boxes of one of the model's tensors, on the CPU, in the type that is stored.

        Only their bytes are read, or whole rows where a box has parts of rows in the file. Nothing beyond the
        boxes is kept.
        """
        if name not in self._layout.pieces and name not in self._layout.ties:
            raise UserError(f"{name}: is not a tensor of this model{did_you_mean(name, self.names())}")
        return [self._read_box(name, box) for box in boxes]

    def _read_box(self, name: str, box: Box) -> Tensor:
        pieces = self._layout.pieces_of(name)
        out = torch.empty(box.sizes, dtype=self._headers.tensors[pieces[0].stored].dtype, device="cpu")
        read_pieces(pieces, box, out, self._read_stored)
        return out

    def _read_stored(self, stored: str, window: Window, out: Tensor) -> None:
        read_box(self._headers.tensors[stored], window, out)


def _sample(tensor: StoredTensor) -> str:
    """A digest of the first and the last bytes."""
    size = nbytes(tensor.shape, tensor.dtype)
    flat = tensor._replace(shape=(size,), dtype=torch.uint8)
    digest = hashlib.blake2b(digest_size=8)
    for window in (slice(0, min(_SAMPLED_BYTES, size)), slice(max(0, size - _SAMPLED_BYTES), size)):
        block = torch.empty(window.stop - window.start, dtype=torch.uint8, device="cpu")
        read_box(flat, (window,), block)
        digest.update(block.numpy().tobytes())
    return digest.hexdigest()


def _is_equal(left: StoredTensor, right: StoredTensor) -> bool:
    """Compare the bits of two tensors, rows by rows: in bounded memory."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    num_bytes = nbytes(left.shape, left.dtype)
    flat = [each._replace(shape=(num_bytes,), dtype=torch.uint8) for each in (left, right)]
    for begin in range(0, num_bytes, _COMPARED_BYTES):
        window = (slice(begin, min(begin + _COMPARED_BYTES, num_bytes)),)
        blocks = [torch.empty(window[0].stop - begin, dtype=torch.uint8, device="cpu") for _ in flat]
        for tensor, block in zip(flat, blocks, strict=True):
            read_box(tensor, window, block)
        if not torch.equal(*blocks):
            return False
    return True
