"""Where the tensors of a checkpoint go: names on the one side, a model's own weights on the other.

A model says it as a table from names to functions that take the tensor in. So a name nobody knows,
a shape that does not fit and a weight that never came are found here, for every model alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ModelError
from ..kernels.linear_quantized import QuantizedWeight
from .linear import Linear, widened

Fill = Callable[[torch.Tensor], None]
Places = dict[str, Fill]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Fills one part of a linear map: the one place that takes weights in few bits as they are."""

    linear: Linear
    part: int
    kind: str

    def __call__(self, tensor: torch.Tensor | QuantizedWeight) -> None:
        self.linear.load(self.part, self.kind, tensor)


def copy_to(parameter: nn.Parameter | torch.Tensor, *, plus: float = 0.0) -> Fill:
    """Copy a tensor into a parameter of the same shape.

    :param plus: added to it in fp32: norms that multiply by one plus their weight become plain
        ones.
    """
    return lambda tensor: copy_into(parameter.data, tensor.float() + plus if plus else tensor)


def copy_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor over another.

    :raises ModelError: when their shapes differ.
    """
    if target.shape != tensor.shape:
        raise ModelError(
            f"a shape of {tuple(tensor.shape)}, where the configuration says {tuple(target.shape)}."
        )
    target.copy_(tensor)


def linear_places(linear: Linear, *names: str) -> Places:
    """Where the parts of a linear map come from: one name each, in the order of its parts."""
    kinds = ("weight",) if linear.bias is None else ("weight", "bias")
    return {
        f"{name}.{kind}": LinearPart(linear, part, kind)
        for part, name in enumerate(names)
        for kind in kinds
    }


def below(prefix: str, places: Places) -> Places:
    """The same places with a prefix to their names."""
    return {f"{prefix}.{name}": fill for name, fill in places.items()}


def fill_places(
    places: Places,
    tensors: Iterable[tuple[str, torch.Tensor | QuantizedWeight]],
    *,
    ignored: re.Pattern[str],
    device: torch.device,
) -> None:
    """Take in a checkpoint.

    :param ignored: names that are passed over: what follows from others, and what is not run.
    :param device: where quantised weights are widened whose place is not a linear map.
    :raises ModelError: for a name that is not known, a shape that does not fit, or a weight that is
        missing.
    """
    missing = set(places)
    for name, tensor in tensors:
        fill = places.get(name)
        if fill is None:
            if ignored.search(name) or _is_no_bias(name, tensor):
                continue
            raise ModelError(
                f"the checkpoint has a tensor {name!r} that this model has no place for."
            )
        try:
            if isinstance(fill, LinearPart):
                fill(tensor)
            else:
                fill(widened(tensor, device))
        except ModelError as error:
            raise ModelError(f"tensor {name!r} of the checkpoint has {error}") from None
        missing.discard(name)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, among them {some}.")


def _is_no_bias(name: str, tensor: torch.Tensor | QuantizedWeight) -> bool:
    """Whether it is a bias of zeros, as GPTQ's tools write for maps that have none."""
    return name.endswith(".bias") and isinstance(tensor, torch.Tensor) and not tensor.any()
