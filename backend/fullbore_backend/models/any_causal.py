"""Every other causal model: transformers' own code, its attention on our paged cache.

transformers lets an attention function be registered by name and hands it each layer's queries,
keys and values. Ours stores keys and values in the pages and attends to them there; everything else
of the model runs as transformers wrote it. So a model without a module of its own beside this one
is served too, more slowly: nothing of it is fused.

That works for models whose only memory of earlier tokens is attention. What it cannot work for is
found out when the model is loaded: it is run on short sequences in chunks, side by side, and has to
say what transformers' own attention says. What shows in long sequences alone is read from the
configuration: kinds of layers, and angles that depend on the length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels import AttentionBatch, KvPages, Ops
from .decoder import KvLayout

logger = logging.getLogger(__name__)

NAME = "fullbore_paged"
_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Layers whose arguments say all that they do; others (chunked, compressed, indexed) also have
masks or states, which may make no difference before the thousandth token."""
_CHECK_LENGTHS = (21, 9)
_CHECK_CHUNK = 8
_CHECK_BLOCK = 4


@dataclass(slots=True)
class _Step:
    """What our attention needs beside queries, keys and values; travels through the model's
    keyword arguments.

    :param pages: one of each layer; none while the layers are being counted.
    :param seen: what each layer's attention was called with.
    """

    ops: Ops
    pages: Sequence[KvPages]
    batch: AttentionBatch | None
    seen: dict[int, tuple[int, int, int, int | None]] = field(default_factory=dict)


class AnyCausalModel(nn.Module):
    """A model of transformers with the face of :class:`.decoder.Decoder`.

    :param path: a folder in Hugging Face's layout.
    :raises ModelError: when the model cannot be run in this way.
    """

    def __init__(self, path: Path, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        AttentionInterface.register(NAME, _attend)
        try:
            # Without `False` a folder with code in it makes transformers ask, on the terminal.
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            self.ops, self.kind = ops, config.model_type
            self._refuse_by(config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=NAME,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except (ValueError, ImportError, OSError, RuntimeError) as error:
            raise ModelError(f"transformers cannot load {path}: {error}") from error
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"the checkpoint lacks {len(missing)} tensors, among them {', '.join(missing[:3])}."
            )
        self.model = model.to(device).eval()
        self.vocab_size: int = config.vocab_size
        self.max_positions = self.usual_positions = _max_positions(config)
        with torch.inference_mode():
            self.kv = self._find_layout()
            self._check()

    def init_rotary(self, max_positions: int) -> None:
        """Nothing to do: the model makes its own angles."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        pages: Sequence[KvPages],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """See :meth:`.decoder.Decoder.forward`."""
        step = _Step(self.ops, pages, batch)
        out = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            fullbore=step,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _refuse_by(self, config: Any) -> None:
        """Raise for what a configuration alone tells."""
        if config.is_encoder_decoder:
            raise self._refusal("they have an encoder, which is not supported")
        if others := sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS):
            raise self._refusal(f"they have layers of kind {', '.join(others)}")
        if not getattr(config, "max_position_embeddings", None):
            raise self._refusal("the configuration does not say how many positions there are")

    def _find_layout(self) -> KvLayout:
        """Run one token, and see what the layers ask attention for."""
        step = _Step(self.ops, (), None)
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        try:
            self.model(
                input_ids=token,
                position_ids=token,
                use_cache=False,
                logits_to_keep=1,
                fullbore=step,
            )
        except (TypeError, ValueError) as error:
            raise self._refusal(f"it cannot be called with our attention ({error})") from error
        shapes = {shape[:3] for shape in step.seen.values()}
        if len(shapes) != 1 or sorted(step.seen) != list(range(len(step.seen))):
            raise self._refusal(
                "its layers do not all keep keys and values of one shape"
                if step.seen
                else "it does not pass on what our attention needs"
            )
        config = self.model.config
        if len(step.seen) != config.num_hidden_layers:
            raise self._refusal("some of its layers remember tokens in another way than attention")
        window = getattr(config, "sliding_window", None)
        slides = any(shape[3] is not None for shape in step.seen.values())
        if window and getattr(config, "use_sliding_window", True) and not slides:
            kinds = set(getattr(config, "layer_types", None) or ())
            if kinds != {"full_attention"}:
                raise self._refusal("it keeps its sliding window from the attention function")
        kv_heads, k_dim, v_dim = shapes.pop()
        return KvLayout(layers=len(step.seen), kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)

    def _check(self) -> None:
        """Compare with transformers' own attention; raise if the two differ."""
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(self.vocab_size, (length,), generator=generator).to(self._device)
            for length in _CHECK_LENGTHS
        ]
        got = self._run_in_chunks(prompts)
        self.model.set_attn_implementation("eager")
        try:
            want = [self.model(input_ids=each[None], use_cache=False).logits[0] for each in prompts]
        finally:
            self.model.set_attn_implementation(NAME)
        dtype = want[0].dtype
        allowed = 1e-4 if dtype == torch.float32 else 0.1
        for ours, theirs in zip(got, want, strict=True):
            error = (ours - theirs.float()).abs().max() / theirs.float().abs().max()
            if not error <= allowed:
                raise self._refusal(
                    "on the paged cache it says something else than on transformers' own "
                    f"(logits differ by {float(error):.1%})"
                )

    def _run_in_chunks(self, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All logits of each prompt, taken a few tokens at a time, side by side."""
        blocks = [-(-len(prompt) // _CHECK_BLOCK) for prompt in prompts]
        shape = (sum(blocks), _CHECK_BLOCK, self.kv.kv_heads)
        dtype = self.model.dtype
        pages = [
            KvPages(
                k=torch.zeros(*shape, self.kv.k_dim, dtype=dtype, device=self._device),
                v=torch.zeros(*shape, self.kv.v_dim, dtype=dtype, device=self._device),
            )
            for _ in range(self.kv.layers)
        ]
        free = list(range(sum(blocks)))[::-1]
        tables = [[free.pop() for _ in range(count)] for count in blocks]
        out: list[list[torch.Tensor]] = [[] for _ in prompts]
        for start in range(0, max(map(len, prompts)), _CHECK_CHUNK):
            live = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
            live.sort(key=lambda i: min(_CHECK_CHUNK, len(prompts[i]) - start))
            pieces = [prompts[i][start : start + _CHECK_CHUNK] for i in live]
            batch = AttentionBatch.build(
                query_lens=[len(piece) for piece in pieces],
                context_lens=[start + len(piece) for piece in pieces],
                block_tables=[tables[i] for i in live],
                block_size=_CHECK_BLOCK,
                device=self._device,
            )
            positions = torch.cat([torch.arange(start, start + len(piece)) for piece in pieces])
            rows = torch.arange(len(positions), device=self._device)
            logits = self(torch.cat(pieces), positions.to(self._device), rows, pages, batch)
            first = 0
            for i, piece in zip(live, pieces, strict=True):
                out[i].append(logits[first : first + len(piece)])
                first += len(piece)
        return [torch.cat(parts) for parts in out]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{self.kind} models cannot be served: {why}.")


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    fullbore: _Step | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, heads, tokens, dim) in, (1, tokens, heads, dim) out.

    :raises ModelError: when the model has lost what the pages are reached by, or masks tokens by
        itself.
    """
    if fullbore is None:
        raise ModelError("this model does not pass on what our attention needs; it is not served.")
    if attention_mask is not None:
        raise ModelError("this model makes an attention mask of its own; it is not served.")
    layer = int(getattr(module, "layer_idx"))  # noqa: B009 (nn.Module does not declare it)
    fullbore.seen[layer] = (key.shape[1], key.shape[3], value.shape[3], sliding_window)
    if fullbore.batch is None:
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    pages = fullbore.pages[layer]
    fullbore.ops.store_kv(
        key[0].transpose(0, 1), value[0].transpose(0, 1), pages, fullbore.batch.slots
    )
    attended = fullbore.ops.paged_attention(
        *(query[0].transpose(0, 1), pages, fullbore.batch),
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return attended[None], None


def _max_positions(config: Any) -> int:
    """How long a sequence may be without a change of the angles of its first tokens.

    longrope has two sets of frequencies, and takes the second for everything it is run on as soon
    as one position lies beyond the original context. Here that would be all sequences of a step,
    on keys that were rotated by the first set.
    """
    limit: int = config.max_position_embeddings
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    for rope in (parameters, *nested):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original and original < limit:
            limit = int(original)
            logger.warning(
                "%s is served with %d tokens of context, not %d: beyond them longrope changes the "
                "angles of all tokens, those in the cache included",
                *(config.model_type, limit, config.max_position_embeddings),
            )
    return limit
