"""Triton where it is installed, and what a kernel states about itself to be compiled.

A CUDA build of torch brings Triton; a CPU build does not, and the engine runs without it. So
kernels take ``triton``, ``tl`` and ``jit`` from here: without Triton, ``jit`` leaves a function
that says so when it is launched. With ``TRITON_INTERPRET=1`` in the environment before this module
is imported, kernels run in Triton's interpreter, on CPU tensors.

This is the only module that imports Triton. It knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    HAS_TRITON = False
    _reason = str(error)

    class _Language:
        """Stands in for ``triton.language`` in annotations and default values."""

        constexpr = Any

    triton = None
    tl = _Language()
else:
    HAS_TRITON = True

__all__ = [
    "CAPABILITIES",
    "HAS_TRITON",
    "CompileCase",
    "Launch",
    "capability",
    "constant",
    "jit",
    "tl",
    "triton",
]

CAPABILITIES = (80, 90, 100)
"""The architectures that kernels are tuned for and compiled for: Ampere, Hopper, Blackwell."""


class _NeedsTriton:
    """What ``jit`` makes of a kernel where there is no Triton."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        raise ConfigError(
            f"kernel {self.__name__} needs Triton, which cannot be imported ({_reason}). "
            "Install triton, or run on the CPU: --device cpu."
        )


def jit(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """``triton.jit``, or a stand-in that raises :class:`ConfigError` when it is launched.

    :param do_not_specialize: integer arguments that differ from launch to launch. Of any other the
        JIT compiles one kernel for 1, one for multiples of 16 and one for the rest.
    """
    if function is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    if not HAS_TRITON:
        return _NeedsTriton(function)
    return triton.jit(function, do_not_specialize=do_not_specialize)


def constant(value: float) -> Any:
    """A number that kernels may read from their module, as they may read no other global."""
    return tl.constexpr(value) if HAS_TRITON else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a kernel is launched: a row of a tuning table.

    :param blocks: block sizes, the constants of the kernel that do not follow from the problem.
    :param num_warps: groups of 32 threads in a program.
    :param num_stages: how many iterations of the main loop have their loads in flight.
    """

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """A kernel at one tuned configuration, as the compile table builds it.

    :param name: ``operation/dtype/sizes``, unique within an operation.
    :param kernel: what :func:`jit` returned.
    :param arguments: the type of every argument that is not a constant, in Triton's words
        (``*bf16``, ``i32``, ``fp32``); a ``:16`` at the end says that it is divisible by 16, as the
        JIT finds of aligned pointers and of most sizes and strides.
    :param constants: values of the ``tl.constexpr`` arguments.
    :param tensor_cores: whether the products must be done by tensor cores: the SASS has to hold
        their instruction (``HMMA``, ``HGMMA``, ``IMMA``, ``QGMMA``, ``UTC*MMA``).
    :param warp_group: whether Hopper must do them by warp groups (``wgmma``), which only tiles of
        64 rows and more can.
    :param may_spill: for a kernel whose registers are known to overflow without harm; say why
        beside it.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    tensor_cores: bool = False
    warp_group: bool = False
    may_spill: bool = False


def capability(device: torch.device) -> int:
    """The newest of :data:`CAPABILITIES` that a device's own reaches, such as 90 for an H200.

    The interpreter, which has no device, counts as 90.
    """
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    reached = [each for each in CAPABILITIES if each <= 10 * major + minor]
    return max(reached, default=min(CAPABILITIES))
