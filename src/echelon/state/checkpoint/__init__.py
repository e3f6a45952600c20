"""Checkpoints: everything that ranks own, in files that any plan can load.

    runs/a/step-000100/
        manifest.json               which slice of which tensor is where; sizes and hashes of all files
        rank-00000.safetensors      what rank 0 has written
        rank-00001.safetensors      …

manifest    the list of contents: plain data, and its bytes (manifest_reader: its rules)
assignment  which of the slices of all ranks a rank writes, each of them once
save        all ranks write into a temporary folder, which then gets its name (target)
saved       a checkpoint that exists: any box of any tensor can be read (storage, file_checks)
folder      the checkpoints of a run: the latest, which are kept, which is whole; the one that a path means

There is no pickle. What strategies made of a model is not stored: names and boxes are those of whole tensors.
"""

from echelon.state.checkpoint.folder import CheckpointFolder

__all__ = ["CheckpointFolder"]
