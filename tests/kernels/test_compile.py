"""Kernels compile for GPUs that are not here, and the table of what they become tells of faults.

A small part of it, in processes of their own: this one interprets kernels. `nox -s compile` does
the whole.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "bench" / "compile_table.py"


@pytest.mark.parametrize("capability", [80, 90, 100], ids="sm_{}".format)
def test_kernels_compile(capability: int) -> None:
    """One case of each of a few operations: enough to see that the way there is open."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--match", "rms_norm/bf16/576", "--capability", str(capability)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 at fault" in done.stdout
