"""The main module. Ranks import that of a script to find functions in it; that of a notebook, a REPL,
`python -c` or a program from standard input they cannot."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_main_importable() -> bool:
    """Return whether a rank can import the main module of this process."""
    main = sys.modules["__main__"]
    if hasattr(main, "get_ipython") and "ipykernel" in sys.modules:
        return False  # a notebook; some editors give its main module a `__file__`
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return not spec.name.startswith("_pyrepl.")  # the REPL of Python 3.13 and later
    return file is not None and Path(file).exists()  # of a program from standard input it is "<stdin>"


@contextmanager
def hidden_main_file() -> Iterator[None]:
    """While a rank is started: multiprocessing lets it import any `__file__`, also "<stdin>"."""
    main = sys.modules["__main__"]
    file = None if is_main_importable() else vars(main).pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file
