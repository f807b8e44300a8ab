"""A decoder in int8 on a CPU, run by the C++ of ``kernels/cpu``.

Made from a :class:`.decoder.Decoder` whose weights are filled in, if it is one of those that are
shaped like Llama: dense pre-norm blocks, grouped-query attention, a gated MLP with SiLU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..kernels import AttentionBatch, KvPages
from ..kernels.cpu import DecoderProgram, LayerWeights, Sizes, pack_weight
from ..kernels.cpu.program import interleave, unsupported
from ..layers.attention import Attention
from ..layers.block import Block, PreNormBlock
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from .decoder import Decoder


class CpuDecoder:
    """The same interface as :class:`.decoder.Decoder`, weights in int8 and activations in fp32.

    :param decoder: gives up its weights, layer by layer, so that both are never held in full. Its
        linear maps must not be packed for another library.
    :param library: of :func:`..kernels.cpu.load_library`.
    :raises ConfigError: it cannot be run this way; :func:`reason_against` says so beforehand.
    """

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, *, threads: int) -> None:
        reason = reason_against(decoder)
        if reason is not None:
            raise ConfigError(reason)
        self.vocab_size, self.max_positions = decoder.vocab_size, decoder.max_positions
        self.usual_positions = decoder.usual_positions
        self.kv = decoder.kv
        self._library, self._threads = library, threads
        self._rotary = decoder
        self._sizes = _sizes(decoder)
        self._layers = [_layer(block) for block in decoder.blocks]
        self._norm = decoder.norm.data
        if decoder.head is None:
            self._head, self._embedding = pack_weight(decoder.embedding.data), None
        else:
            self._head = pack_weight(_taken(decoder.head))
            self._embedding = decoder.embedding.data.to(torch.bfloat16)
        decoder.embedding.data = torch.empty(0)
        decoder.tied_head = torch.empty(0)
        self._program: DecoderProgram | None = None

    def init_rotary(self, max_positions: int) -> None:
        """Make the angle tables for positions below ``max_positions``."""
        self._rotary.init_rotary(max_positions)
        cosines, sines = self._rotary.tables[0]
        self._program = DecoderProgram(
            self._library,
            self._sizes,
            self._layers,
            norm=self._norm,
            head=self._head,
            embedding=self._embedding,
            cosines=cosines,
            sines=sines,
            threads=self._threads,
        )

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        pages: Sequence[KvPages],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Run one step; see :meth:`.decoder.Decoder.forward`."""
        assert self._program is not None, "init_rotary comes first"
        return self._program.step(token_ids, positions, rows, pages, batch)


def reason_against(decoder: Decoder) -> str | None:
    """Why a model cannot be run this way; ``None`` if it can."""
    if (
        len(decoder.rotaries) != 1
        or decoder.embedding_scale != 1.0
        or decoder.logit_cap is not None
    ):
        return "the CPU kernels know no scaled embeddings, capped logits or second rotary table."
    for block in decoder.blocks:
        if not isinstance(block, PreNormBlock):
            return "the CPU kernels know pre-norm blocks alone."
        attention, mlp = block.attention, block.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, GatedMlp):
            return "the CPU kernels know grouped-query attention and dense gated MLPs alone."
        if attention.soft_cap is not None or attention.sinks is not None or not mlp.is_silu:
            return "the CPU kernels know no soft caps, sinks or activations but silu."
    return unsupported(_sizes(decoder))


def _parts(block: Block) -> tuple[PreNormBlock, Attention, GatedMlp]:
    """A block that :func:`reason_against` found nothing against, and what it is made of."""
    assert isinstance(block, PreNormBlock)
    assert isinstance(block.attention, Attention)
    assert isinstance(block.mlp, GatedMlp)
    return block, block.attention, block.mlp


def _sizes(decoder: Decoder) -> Sizes:
    _, attention, mlp = _parts(decoder.blocks[0])
    return Sizes(
        hidden=decoder.norm.shape[0],
        intermediate=mlp.gate_up.parts[0],
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab_size=decoder.vocab_size,
        eps=decoder.eps,
        scale=attention.scale,
    )


def _layer(block: Block) -> LayerWeights:
    norms, attention, mlp = _parts(block)
    intermediate = mlp.gate_up.parts[0]
    bias = mlp.gate_up.bias
    return LayerWeights(
        attention_norm=norms.attention_norm.data,
        mlp_norm=norms.mlp_norm.data,
        qkv=pack_weight(_taken(attention.qkv)),
        out=pack_weight(_taken(attention.out)),
        gate_up=pack_weight(interleave(_taken(mlp.gate_up), intermediate)),
        down=pack_weight(_taken(mlp.down)),
        qkv_bias=attention.qkv.bias,
        out_bias=attention.out.bias,
        gate_up_bias=None if bias is None else interleave(bias.data, intermediate),
        down_bias=mlp.down.bias,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        window=attention.window,
    )


def _taken(linear: Linear) -> torch.Tensor:
    """The weight, (outputs, inputs), which the layer keeps no longer."""
    weight: torch.Tensor = linear.packed
    linear.packed = torch.empty(0)
    return weight
