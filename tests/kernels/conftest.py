"""How far a kernel may be from the truth, and the device that the tests of kernels run on.

The rule is FlashAttention's: a kernel's largest error against the result in fp64 is at most twice
that of its torch twin in the same precision.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU where kernels are interpreted."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def assert_as_exact() -> Callable[..., None]:
    """``assert_as_exact(got, twin, exact, *, floor=...)``: the rule above."""
    return check_as_exact


def check_as_exact(
    got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, *, floor: float | None = None
) -> None:
    """Raise with the worst error and where it is when ``got`` breaks the rule.

    :param got: the kernel's result; :param twin: the twin's, in the same dtype; :param exact: fp64.
    :param floor: an error that always passes, relative to the largest magnitude of ``exact``; the
        default is one unit in the last place of the dtype: the twin may be exact by luck.
    """
    assert got.shape == twin.shape == exact.shape
    assert got.dtype == twin.dtype
    if not exact.numel():
        return
    # Triton's interpreter cuts bf16 off instead of rounding it, which doubles the error.
    factor = 4 if INTERPRETED and got.dtype == torch.bfloat16 else 2
    unit = torch.finfo(got.dtype).eps if floor is None else floor
    errors = (got.double() - exact).abs()
    assert not errors.isnan().any(), "the kernel returned NaN"
    allowed = factor * (twin.double() - exact).abs().max() + unit * exact.abs().max()
    worst = errors.max()
    at = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    assert worst <= allowed, (
        f"error {worst:.3g} at {at} (got {got[at].item():.6g}, exact {exact[at].item():.6g}); "
        f"allowed {allowed:.3g}"
    )
