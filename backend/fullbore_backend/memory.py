"""How many blocks the KV cache may have: from a size asked for, or from the memory that is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .errors import ConfigError

DEFAULT_SHARE = 0.25
"""Of the memory available on a CPU machine, the share the KV cache takes when no size is given."""

DEFAULT_CAP = 4 * 2**30
"""The most bytes the KV cache takes on a CPU machine when no size is given."""

GPU_SHARE = 0.92
"""Of the memory of a GPU that is free beside weights and the largest step; the rest is for graphs
and fragments."""


def available_memory(device: torch.device) -> int:
    """Bytes that this process could still take on ``device``.

    On a CPU machine the smaller of what the kernel calls available and what a control group leaves.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [limit for limit in (_kernel_available(), _cgroup_available()) if limit is not None]
    if limits:
        return min(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def num_kv_blocks(
    *,
    requested_bytes: int | None,
    block_bytes: int,
    useful_blocks: int,
    device: torch.device,
    step_bytes: int = 0,
) -> int:
    """Blocks of the KV pool.

    :param requested_bytes: size asked for, or ``None`` to take a share of the available memory.
    :param useful_blocks: what every request at full length would need: more is never taken unasked.
    :param step_bytes: what the largest step takes of a GPU while it runs.
    :raises ConfigError: when not even one block fits.
    """
    if requested_bytes is None:
        available = available_memory(device)
        if device.type == "cuda":
            budget = int((available - step_bytes) * GPU_SHARE)
        else:
            budget = min(int(available * DEFAULT_SHARE), DEFAULT_CAP)
        blocks = min(budget // block_bytes, useful_blocks)
    else:
        budget = requested_bytes
        blocks = requested_bytes // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has {budget} bytes, and one block takes {block_bytes}. "
            "Free memory, or raise --kv-cache-memory."
        )
    return blocks


def _kernel_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None  # not Linux
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    root = Path("/sys/fs/cgroup")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            text = (root / limit).read_text().strip()
            if text != "max":
                return max(int(text) - int((root / usage).read_text()), 0)
        except (OSError, ValueError):
            continue
    return None
