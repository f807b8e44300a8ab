"""What each step computes, in pure Python: no torch, no I/O, no clock.

A step is a value: ``batch = scheduler.schedule()``, the runner turns it into tokens, and
``scheduler.apply(batch, tokens)`` takes them in.
"""

from .batch import Batch, Chunk
from .blocks import BlockPool
from .prefix import PrefixCursor, PrefixIndex
from .scheduler import Scheduler
from .sequence import Sequence
from .waiting import WaitingQueue

__all__ = [
    "Batch",
    "BlockPool",
    "Chunk",
    "PrefixCursor",
    "PrefixIndex",
    "Scheduler",
    "Sequence",
    "WaitingQueue",
]
