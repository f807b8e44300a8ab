"""A named thing to measure.

Sections yield cases without making a tensor; a case makes its own when it is measured, so that
what one needs is given back before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_timing import Row


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the result.

    :param measure: returns the row; raises :class:`~gpu_timing.SkippedError` where it cannot be.
    :param patience: seconds after which it counts as hung, compiling included.
    """

    name: str
    measure: Callable[[], Row]
    patience: float = 90.0
