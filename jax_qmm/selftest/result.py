"""What a check says of a kernel, and what several families of kernels share."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    """One kernel on one input.

    Attributes:
      op: what was computed, in words.
      kernel: in words.
      shape: of the input, in words.
      wrong: how many elements of the result differ from the reference's by more than they may.
    """

    op: str
    kernel: str
    shape: str
    wrong: int


Checks = Iterator[tuple[str, Callable[[], Iterator[Result]]]]  # by name


def by_each(restrict, words, run) -> Iterator[tuple[str, np.ndarray]]:
    """What `run` gives by each of these kernels in words, with its words; `restrict` leaves only one to choose from."""
    for each in words:
        restrict(each)
        try:
            out = np.asarray(run())
        finally:
            restrict("")
        yield each, out


def one_for_all(choices: list[tuple[str, int]]) -> list[str]:
    """The words of choices with their bytes of workspace: the largest comes first, as its program serves all."""
    return [words for words, _ in sorted(choices, key=lambda choice: -choice[1])]


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")
