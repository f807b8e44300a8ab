"""A feed-forward layer of many experts, of which each token uses a few; see ``kernels/moe.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ModelError
from ..kernels import Ops
from ..kernels.moe import Activation, Scoring
from .mlp import GatedMlp
from .places import Places, below, copy_into, copy_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are chosen; see :func:`..kernels.moe.route_torch`.

    :param selection_bias: there is a bias for the choice alone.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


class Moe(nn.Module):
    """Router, experts, and perhaps a block that every token passes.

    :param intermediate: size of one expert's hidden layer.
    :param shared: that of the block for all, or 0 for none.
    :param bias: biases of the router and of the experts.
    :param router: what checkpoints call the router.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        routing: Routing,
        activation: Activation = "silu",
        shared: int = 0,
        bias: bool = False,
        router: str = "gate",
    ) -> None:
        super().__init__()
        self.ops, self.routing, self.activation = ops, routing, activation
        self.experts, self.intermediate, self.router_name = experts, intermediate, router
        # The router is small, and what it says decides: it is kept and used in fp32.
        self.router = _empty(experts, hidden, dtype=torch.float32)
        self.router_bias = _empty(experts, dtype=torch.float32) if bias else None
        self.selection_bias = (
            _empty(experts, dtype=torch.float32) if routing.selection_bias else None
        )
        self.gate_up = _empty(experts, 2 * intermediate, hidden)
        self.down = _empty(experts, hidden, intermediate)
        self.gate_up_bias = _empty(experts, 2 * intermediate) if bias else None
        self.down_bias = _empty(experts, hidden) if bias else None
        self.shared = GatedMlp(ops, hidden, shared) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """:param x: (tokens, hidden). Returns the same shape."""
        routing = self.routing
        weights, experts = self.ops.route(
            F.linear(x.float(), self.router, self.router_bias),
            top_k=routing.top_k,
            scoring=routing.scoring,
            bias=self.selection_bias,
            renormalize=routing.renormalize,
            groups=routing.groups,
            top_groups=routing.top_groups,
            scale=routing.scale,
        )
        out = self.ops.fused_experts(
            *(x, self.gate_up, self.down, weights, experts),
            activation=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )
        return out if self.shared is None else out + self.shared(x)

    def places(self) -> Places:
        """Its weights, by their names in a checkpoint below ``mlp``."""
        places: Places = {f"{self.router_name}.weight": copy_to(self.router)}
        if self.router_bias is not None:
            places[f"{self.router_name}.bias"] = copy_to(self.router_bias)
        if self.selection_bias is not None:
            places[f"{self.router_name}.e_score_correction_bias"] = copy_to(self.selection_bias)
        if self.shared is not None:
            places |= below("shared_experts", self.shared.places())
        if self.gate_up_bias is None or self.down_bias is None:
            return places | self._separate_places()
        return places | self._stacked_places(self.gate_up_bias, self.down_bias)

    def _separate_places(self) -> Places:
        """Experts one by one, gate and up apart."""
        size, places = self.intermediate, Places()
        for expert in range(self.experts):
            gate, up = self.gate_up.data[expert, :size], self.gate_up.data[expert, size:]
            down = self.down.data[expert]
            places[f"experts.{expert}.gate_proj.weight"] = partial(copy_into, gate)
            places[f"experts.{expert}.up_proj.weight"] = partial(copy_into, up)
            places[f"experts.{expert}.down_proj.weight"] = partial(copy_into, down)
        return places

    def _stacked_places(self, gate_up_bias: torch.Tensor, down_bias: torch.Tensor) -> Places:
        """gpt-oss's: all experts in one tensor, gate and up in turn, inputs before outputs."""
        return {
            "experts.gate_up_proj": lambda stack: copy_into(
                self.gate_up.data, _apart(stack.transpose(1, 2))
            ),
            "experts.gate_up_proj_bias": lambda bias: copy_into(gate_up_bias.data, _apart(bias)),
            "experts.down_proj": lambda stack: copy_into(self.down.data, stack.transpose(1, 2)),
            "experts.down_proj_bias": copy_to(down_bias),
        }


def sigmoid_moe(config: Mapping[str, Any], hidden: int, ops: Ops) -> Moe:
    """The experts of DeepSeek-V3 and of GLM-4.5, as a ``config.json`` describes them.

    :raises ModelError: for groups that do not divide the experts.
    """
    experts = config.get("n_routed_experts") or config["num_local_experts"]
    groups = config.get("n_group") or 1
    if experts % groups:
        raise ModelError(f"{experts} experts do not fall into {groups} groups of one size.")
    return Moe(
        ops,
        hidden=hidden,
        intermediate=config["moe_intermediate_size"],
        experts=experts,
        routing=Routing(
            top_k=config["num_experts_per_tok"],
            scoring="sigmoid",
            renormalize=bool(config.get("norm_topk_prob", True)),
            selection_bias=True,
            groups=groups,
            top_groups=config.get("topk_group") or 1,
            scale=float(config.get("routed_scaling_factor", 1.0)),
        ),
        shared=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
    )


def _apart(interleaved: torch.Tensor) -> torch.Tensor:
    """(experts, 2 · size, ...) with gate and up in turn to the same with gate above up."""
    return torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1)


def _empty(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
