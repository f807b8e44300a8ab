"""What one step computes: the value that the scheduler hands to the runner.

Plain values; nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .sequence import Sequence


class Chunk(NamedTuple):
    """A run of one sequence's tokens to compute in this step.

    A named tuple, since it costs half of what a frozen dataclass does and a step makes one for
    every running sequence.

    ``start`` is the position of its first token. ``samples`` says that the chunk reaches the last
    token, so the runner must return the one that follows. In a batch scheduled ahead the chunk's
    last token may be the one that the batch before samples, and not be in ``token_ids`` yet.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step: at most one chunk a sequence, single tokens of running sequences first.

    ``num_tokens`` is the sum over chunks, never 0. ``preempted`` are the sequences that lost their
    blocks while this batch was put together; none of them is in ``chunks``. ``number`` counts the
    batches of a scheduler.
    """

    chunks: tuple[Chunk, ...]
    num_tokens: int
    preempted: tuple[Sequence, ...]
    number: int = 0
