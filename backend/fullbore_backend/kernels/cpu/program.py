"""A decoder as the C++ sees it: structures of pointers, and a step as one call.

The structures mirror those of `gemm.h`, `attention.h` and `decoder.cpp`, field by field.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ..attention_batch import AttentionBatch
from ..kv_pages import KvPages
from .pack import GROUP, PANEL, PackedWeight

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
"""The dimensions of a head that there is code for."""

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The dtypes that pages may have, and their numbers in the C++."""


class _Weight(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int32),
        ("inputs", c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", _Weight),
        ("out", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("window", c_int32),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "intermediate", "heads", "kv_heads")),
        *((name, c_int32) for name in ("dim", "pairs", "layers", "vocab")),
        ("eps", c_float),
        ("scale", c_float),
        *((name, c_void_p) for name in ("norm", "cosines", "sines", "layer")),
        ("head", _Weight),
        ("embedding", c_void_p),
    )


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale"))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("tokens", "rows", "sequences", "table_stride")),
        *((name, c_int32) for name in ("block_size", "stored", "max_context")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "sampled")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_table")),
        ("pages", c_void_p),
        ("logits", c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a model's layers have in common.

    :param scale: multiplies the scores of attention.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Norms and biases are fp32; those of queries and keys may be ``None``.

    :param gate_up: see :func:`interleave`.
    """

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int | None = None


def interleave(gate_up: torch.Tensor, intermediate: int) -> torch.Tensor:
    """Rows of gate above those of up, to sixteen of the one and sixteen of the other in turn.

    :param gate_up: (2 · intermediate, ...). The intermediate size is padded with zeros to 16.
    """
    halves = gate_up.view(2, intermediate, *gate_up.shape[1:])
    if intermediate % 16:
        padding = halves.new_zeros(2, -intermediate % 16, *gate_up.shape[1:])
        halves = torch.cat((halves, padding), 1)
    return halves.view(2, -1, 16, *gate_up.shape[1:]).transpose(0, 1).flatten(0, 2)


class DecoderProgram:
    """A model ready to run.

    :param library: of :func:`.build.load_library`.
    :param embedding: (vocab_size, hidden) bf16; ``None`` reads the head's rows instead.
    :param cosines: and :param sines: (positions, pairs) fp32.
    :param threads: how many work on a step, the caller's among them.
    :raises ConfigError: for sizes that there is no code for.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        *,
        norm: torch.Tensor,
        head: PackedWeight,
        embedding: torch.Tensor | None,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        threads: int,
    ) -> None:
        reason = unsupported(sizes)
        if reason is not None:
            raise ConfigError(reason)
        self._library = library
        self._kept: list[torch.Tensor] = []  # what the structures point to
        self._layers = (_Layer * len(layers))(*(self._layer(each) for each in layers))
        self._model = _Model(
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            dim=sizes.head_dim,
            pairs=cosines.shape[1],
            layers=len(layers),
            vocab=sizes.vocab_size,
            eps=sizes.eps,
            scale=sizes.scale,
            norm=self._keep(norm, torch.float32),
            cosines=self._keep(cosines, torch.float32),
            sines=self._keep(sines, torch.float32),
            layer=ctypes.addressof(self._layers),
            head=self._weight(head, None),
            embedding=self._keep(embedding, torch.bfloat16),
        )
        self._pages: tuple[Sequence[KvPages], ctypes.Array[_Pages], int] | None = None
        self._vocab_size = sizes.vocab_size
        self._logits = torch.empty(0, self._vocab_size)  # fresh memory costs more than it holds
        self._runner = library.fullbore_open(threads)
        if not self._runner:
            raise MemoryError("no memory for the threads of the CPU kernels")
        weakref.finalize(self, library.fullbore_close, self._runner)

    def step(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        pages: Sequence[KvPages],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Run one step; see ``Decoder.forward``. Other Python threads run meanwhile.

        :param token_ids: and :param positions: (tokens,) int64; :param rows: (sampled,) int64.
        :returns: (sampled, vocab_size) fp32, the next step's to write over.
        """
        if self._logits.shape[0] < len(rows):
            self._logits = torch.empty(len(rows), self._vocab_size)
        logits = self._logits[: len(rows)]
        if not len(token_ids):
            return logits
        structures, stored = self._structures(pages)
        inputs = {
            "token_ids": token_ids.contiguous(),
            "positions": positions.contiguous(),
            "slots": batch.slots.contiguous(),
            "sampled": rows.contiguous(),
            "query_starts": batch.query_starts.contiguous(),
            "context_lens": batch.context_lens.contiguous(),
            "block_table": batch.block_table.contiguous(),
        }
        step = _Step(
            tokens=len(token_ids),
            rows=len(rows),
            sequences=len(batch.context_lens),
            table_stride=batch.block_table.shape[1],
            block_size=pages[0].block_size,
            stored=stored,
            max_context=batch.max_context_len,
            pages=ctypes.addressof(structures),
            logits=logits.data_ptr(),
            **{name: each.data_ptr() for name, each in inputs.items()},
        )
        failed = self._library.fullbore_step(
            self._runner, ctypes.byref(self._model), ctypes.byref(step)
        )
        if failed:
            raise MemoryError(f"no memory for a step of {len(token_ids)} tokens")
        return logits

    def _structures(self, pages: Sequence[KvPages]) -> tuple[ctypes.Array[_Pages], int]:
        """The pages' addresses, made once for each pool."""
        if self._pages is None or self._pages[0] is not pages:
            stored = STORED.get(pages[0].k.dtype)
            if stored is None:
                raise ConfigError(
                    f"the CPU kernels know no {pages[0].k.dtype} pages; use fp32, bf16 or int8."
                )
            structures = (_Pages * len(pages))(
                *(
                    _Pages(*(_address(each) for each in (p.k, p.v, p.k_scale, p.v_scale)))
                    for p in pages
                )
            )
            self._pages = (pages, structures, stored)
        return self._pages[1:]

    def _layer(self, each: LayerWeights) -> _Layer:
        return _Layer(
            attention_norm=self._keep(each.attention_norm, torch.float32),
            mlp_norm=self._keep(each.mlp_norm, torch.float32),
            q_norm=self._keep(each.q_norm, torch.float32),
            k_norm=self._keep(each.k_norm, torch.float32),
            qkv=self._weight(each.qkv, each.qkv_bias),
            out=self._weight(each.out, each.out_bias),
            gate_up=self._weight(each.gate_up, each.gate_up_bias),
            down=self._weight(each.down, each.down_bias),
            window=each.window or 0,
        )

    def _weight(self, weight: PackedWeight, bias: torch.Tensor | None) -> _Weight:
        count, groups, _ = weight.panels.shape
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, count * PANEL - len(bias)))
        return _Weight(
            panels=self._keep(weight.panels, torch.uint8),
            bias=self._keep(bias, torch.float32),
            rows=count * PANEL,
            inputs=groups * GROUP,
        )

    def _keep(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
        """Hold on to a tensor, as ``dtype``; its address."""
        if tensor is None:
            return None
        self._kept.append(tensor.to(dtype).contiguous())
        return self._kept[-1].data_ptr()


def unsupported(sizes: Sizes) -> str | None:
    """Why there is no code for such sizes; ``None`` if there is."""
    if sizes.head_dim not in HEAD_DIMS:
        return f"heads have {sizes.head_dim} dimensions; the CPU kernels know {HEAD_DIMS}."
    if sizes.hidden % 16:
        return f"the hidden size is {sizes.hidden}; the CPU kernels need a multiple of 16."
    return None


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
