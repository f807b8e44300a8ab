"""Weights that a checkpoint keeps in several tensors: codes, scales, zeros; brought together here.

What the parts are called and mean is the format's to know: :mod:`.awq`, :mod:`.gptq`, :mod:`.fp8`,
:mod:`.compressed`. A module that was left alone has a plain ``weight``; so the tensors themselves
tell which are quantised, and the lists of exceptions in configurations are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

    from ..kernels.linear_quantized import QuantizedWeight

    Weight: TypeAlias = torch.Tensor | QuantizedWeight
    """(outputs, inputs): as it is, or in few bits where a kernel can multiply with it so."""

_WEIGHT = "weight"
_PASSED_OVER = frozenset(
    {
        *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub"),
        *("activation_scale", "q_scale", "k_scale", "v_scale", "output_scale"),
    }
)
"""Scales of activations and of the cache: here they follow from what comes, token by token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a checkpoint keeps its quantised weights.

    :param parts: the last words of the names that together make a weight.
    :param join: a module's name and its parts, to its weight.
    """

    parts: frozenset[str]
    join: Callable[[str, Mapping[str, torch.Tensor]], Weight]


def join_parts(
    tensors: Iterable[tuple[str, torch.Tensor]], names: Iterable[str], kept: Format
) -> Iterator[tuple[str, Weight]]:
    """Replace the parts of each quantised weight by the weight, once the last of them has come.

    :param tensors: of a whole checkpoint; :param names: all of their names.
    :raises ModelError: naming a tensor that is missing or cannot be what it should.
    """
    modules: dict[str, set[str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        if part in kept.parts:
            modules.setdefault(module, set()).add(part)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if part in _PASSED_OVER:
            continue
        if part not in kept.parts or modules[module] == {_WEIGHT}:
            yield name, _plain(name, tensor)
            continue
        found = waiting.setdefault(module, {})
        found[part] = tensor
        if found.keys() == modules[module]:
            yield f"{module}.{_WEIGHT}", kept.join(module, waiting.pop(module))


def require(
    module: str, parts: Mapping[str, torch.Tensor], part: str, *, dims: int | None = 2
) -> torch.Tensor:
    """One part of a module's weight.

    :param dims: how many dimensions it must have; ``None`` leaves that open.
    :raises ModelError: if it is missing, or has others.
    """
    tensor = parts.get(part)
    if tensor is None:
        there = ", ".join(sorted(parts))
        raise ModelError(f"the checkpoint has no {module}.{part}, which goes with {there}.")
    if dims is not None and tensor.dim() != dims:
        raise unfit(f"{module}.{part}", tensor, f"{dims} dimensions were expected")
    return tensor


def unfit(name: str, tensor: torch.Tensor, expected: str) -> ModelError:
    """The error for a tensor of a wrong shape or dtype."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return ModelError(
        f"{name} of the checkpoint is {kind} of shape {tuple(tensor.shape)}; {expected}."
    )


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith(f".{_WEIGHT}") and tensor.dtype.itemsize == 1:
        raise unfit(name, tensor, "there is no scale beside it, by which it would be multiplied")
    return tensor
