"""Where `echelon schedule --out` may write: known before a schedule is simulated or measured."""

import os
from pathlib import Path

_SUFFIXES = (".svg", ".png", ".txt")


def out_errors(out: Path) -> list[str]:
    """Why a picture or a program cannot be written to this file."""
    errors = []
    if out.suffix not in _SUFFIXES:
        errors.append(f"--out {out}: must end in .svg or .png for a picture, or .txt for the program")
    target = out if out.exists() else out.parent
    if out.is_dir():
        errors.append(f"--out {out}: is a folder; give a file in it")
    elif not target.exists():
        errors.append(f"--out {out}: there is no folder {out.parent}; make it, or choose another file")
    elif not os.access(target, os.W_OK) or not out.parent.is_dir():
        errors.append(f"--out {out}: cannot be written; choose another file")
    return errors
