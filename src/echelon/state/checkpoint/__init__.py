"""Checkpoints: everything that ranks own, in files that any plan can load.

    runs/a/step-000100/
        manifest.json               which slice of which tensor is where; sizes and hashes of all files
        rank-00000.safetensors      what rank 0 has written
        rank-00001.safetensors      …

manifest    the list of contents, as plain data (manifest_text: its bytes; manifest_reader, tiling: its rules)
numbers     counters of steps and the like, for another kind of training too
part        which of the slices of all ranks a rank writes, each of them once
save        all ranks write into a folder with a temporary name, which then gets its own
saved       a checkpoint that is there: any box of any tensor can be read
opening     the same on all ranks, with its hashes compared (file_checks, regular_file)
folder      the checkpoints of a run: the latest, which are kept, which is whole
finding     the one that a path means
summary     what is in one, in numbers

There is no pickle. What strategies made of a model is not stored: names and boxes are those of whole tensors.
"""

from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.numbers import number_errors, numbers_of
from echelon.state.checkpoint.opening import open_whole
from echelon.state.checkpoint.save import SaveOptions, Saver
from echelon.state.checkpoint.saved import SavedParameter, SavedState, SavedTensor
from echelon.state.checkpoint.storage_errors import RETRIES

__all__ = [
    "RETRIES",
    "CheckpointFolder",
    "Manifest",
    "SaveOptions",
    "SavedParameter",
    "SavedState",
    "SavedTensor",
    "Saver",
    "number_errors",
    "numbers_of",
    "open_whole",
]
