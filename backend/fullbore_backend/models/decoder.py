"""What every model here is around its layers: embedding, final norm, head, rotary tables, weights.

The layers are the model's own; see the modules beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels import AttentionBatch, KvPages, Ops
from ..kernels.linear_quantized import QuantizedWeight
from ..layers.block import Block
from ..layers.linear import Linear
from ..layers.places import LinearPart, Places, below, copy_to, fill_places, linear_places
from ..layers.rotary import rotary_tables, trained_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What one token takes in the cache: in each layer, ``kv_heads`` keys and values."""

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """One kind of rotary angles; see :func:`..layers.rotary.rotary_tables`.

    :param dim: dimensions of a head that turn.
    """

    dim: int
    theta: float
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The settings that all models have, named as in the code; see :meth:`from_hf`.

    :param spare_layers: layers beyond the last one in a checkpoint, which are not run: DeepSeek and
        GLM keep there what predicts further tokens.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    max_positions: int
    tied: bool
    rotary: Rotary
    activation: str
    spare_layers: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face ``config.json`` in the form of ``weights/config_json.py``.

        :raises ModelError: for a size that is missing.
        """
        try:
            heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
            return cls(
                vocab_size=config["vocab_size"],
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=head_dim,
                intermediate=config["intermediate_size"],
                norm_eps=config.get("rms_norm_eps", 1e-6),
                max_positions=_max_positions(config),
                tied=bool(config.get("tie_word_embeddings", False)),
                rotary=Rotary(
                    dim=int(head_dim * config.get("partial_rotary_factor", 1.0)),
                    theta=float(config.get("rope_theta") or 10_000.0),
                    scaling=config.get("rope_scaling"),
                ),
                activation=config.get("hidden_act", "silu"),
                spare_layers=config.get("num_nextn_predict_layers") or 0,
            )
        except KeyError as error:
            raise ModelError(f"the model's configuration lacks {error}.") from None

    def require_silu(self) -> None:
        """Raise :class:`ModelError` for another activation."""
        if self.activation != "silu":
            raise ModelError(f"activation {self.activation!r} is not supported; silu is.")


def _max_positions(config: Mapping[str, Any]) -> int:
    """The longest sequence; ``dynamic`` scaling is for lengths beyond those of training."""
    limit: int = config.get("max_position_embeddings", 2048)
    scaling = config.get("rope_scaling") or {}
    return int(limit * scaling["factor"]) if scaling.get("rope_type") == "dynamic" else limit


class Decoder(nn.Module):
    """The whole model: token ids in, logits of chosen rows out.

    :param rotaries: the kinds of angles that its layers use, by number.
    :param kv: what its layers keep of a token; by default what ``config`` says.
    :param embedding_scale: multiplies the embedded tokens.
    :param norm_plus: added to the weight of the final norm.
    :param logit_cap: logits become ``cap · tanh(logit / cap)``.
    """

    def __init__(
        self,
        ops: Ops,
        config: DecoderConfig,
        blocks: Sequence[Block],
        *,
        rotaries: Sequence[Rotary] = (),
        kv: KvLayout | None = None,
        embedding_scale: float = 1.0,
        norm_plus: float = 0.0,
        logit_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.ops, self.eps, self.blocks = ops, config.norm_eps, blocks
        # Lets torch see them; `blocks` keeps their type.
        self._owned = nn.ModuleList(b for b in blocks if isinstance(b, nn.Module))
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        # What is served unless more is asked for: see `layers/rotary.py`.
        self.usual_positions = trained_positions(config.rotary.scaling) or config.max_positions
        self.spare_layers = config.spare_layers
        self.rotaries = tuple(rotaries) or (config.rotary,)
        self.kv = kv or KvLayout(
            layers=config.layers,
            kv_heads=config.kv_heads,
            k_dim=config.head_dim,
            v_dim=config.head_dim,
        )
        self.embedding_scale, self.norm_plus, self.logit_cap = embedding_scale, norm_plus, logit_cap
        self.embedding = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden), requires_grad=False
        )
        # A sum in fewer bits would not be what the checkpoint says.
        norm_dtype = torch.float32 if norm_plus else None
        self.norm = nn.Parameter(torch.empty(config.hidden, dtype=norm_dtype), requires_grad=False)
        self.head = None if config.tied else Linear(ops, config.hidden, config.vocab_size)
        self.tables: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # made by init_rotary

    def init_rotary(self, max_positions: int) -> None:
        """Make the angle tables for positions below ``max_positions``."""
        self.tables = tuple(
            (cos.to(self.embedding.device), sin.to(self.embedding.device))
            for cos, sin in (
                rotary_tables(
                    head_dim=each.dim,
                    max_positions=max_positions,
                    theta=each.theta,
                    scaling=each.scaling,
                )
                for each in self.rotaries
            )
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        pages: Sequence[KvPages],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Run one step.

        :param token_ids: and :param positions: (tokens,) int64.
        :param rows: (sampled,) int64, the tokens whose logits are wanted.
        :param pages: one of each layer.
        :returns: (sampled, vocab_size) in fp32.
        """
        return self.logits(self.hidden(token_ids, positions, rows, pages, batch))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        pages: Sequence[KvPages],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Run the layers and the final norm; (sampled, hidden). See :meth:`forward`."""
        ropes = [(cos[positions], sin[positions]) for cos, sin in self.tables]
        x = nn.functional.embedding(token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            x = x * torch.tensor(self.embedding_scale, dtype=x.dtype, device=x.device)
        residual: torch.Tensor | None = None
        for block, layer_pages in zip(self.blocks, pages, strict=True):
            x, residual = block(x, residual, ropes, layer_pages, batch)
        assert residual is not None, "a model has at least one layer"
        return self.ops.rms_norm(x[rows] + residual[rows], self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) of :meth:`hidden` to (rows, vocab_size) in fp32."""
        logits = self.ops.linear(hidden, self.tied_head) if self.head is None else self.head(hidden)
        wide: torch.Tensor = logits.float()
        if self.logit_cap is not None:
            wide = self.logit_cap * torch.tanh(wide / self.logit_cap)
        return wide

    def load(self, tensors: Iterable[tuple[str, torch.Tensor | QuantizedWeight]]) -> None:
        """Fill in every weight from (Hugging Face name, tensor) pairs.

        :raises ModelError: for a name that is not known, a wrong shape, or a weight left out.
        """
        fill_places(self.places(), tensors, ignored=self._ignored(), device=self.embedding.device)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.head is None:
            self.tied_head = self.ops.pack_linear(self.embedding.data)

    def places(self) -> Places:
        """Every weight, by its name in a checkpoint."""
        places: Places = {
            "model.embed_tokens.weight": copy_to(self.embedding),
            "model.norm.weight": copy_to(self.norm, plus=self.norm_plus),
        }
        if self.head is not None:
            places |= linear_places(self.head, "lm_head")
        for number, block in enumerate(self.blocks):
            places |= below(f"model.layers.{number}", block.places())
        return places

    def linear_weights(self) -> frozenset[str]:
        """Names of the weights of its linear maps, the output head's apart."""
        return frozenset(
            name
            for name, fill in self.places().items()
            if isinstance(fill, LinearPart)
            and fill.kind == "weight"
            and fill.linear is not self.head
        )

    def _ignored(self) -> re.Pattern[str]:
        """Names that follow from the configuration, that repeat the embedding, or spare layers'."""
        patterns = [r"rotary_emb\.inv_freq$"]
        if self.head is None:
            patterns.append(r"^lm_head\.weight$")
        first = len(self.blocks)
        patterns += [rf"^model\.layers\.{first + extra}\." for extra in range(self.spare_layers)]
        return re.compile("|".join(patterns))
