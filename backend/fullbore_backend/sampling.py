"""Logits to tokens: penalties, bias, temperature, filters, and a draw that is each request's own.

Every request is sampled as if it were alone: its random numbers come from its seed and the position
of the token, so they depend neither on its neighbours in the batch nor on whether it was preempted.
Knows nothing of scheduling or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .request import SamplingParams, TokenLogprobs

_MASK64 = (1 << 64) - 1
_COLDEST = 1e-5
"""Lower temperatures are this one: below it, scaled logits would leave fp32's range."""

_CANDIDATES = 512
"""Top-p looks at this many likeliest tokens first, and sorts the whole vocabulary only when they do
not hold the wanted mass: a sort of 50,000 logits takes milliseconds a row on a CPU."""


class SamplingState:
    """What sampling must remember of one request between steps.

    :param prompt_token_ids: counted by the repetition penalty alone.
    :param banned: ids that may not be sampled before ``params.min_tokens`` (end tokens and stop
        ids).
    :param seed: used when ``params.seed`` is ``None``.
    """

    __slots__ = ("_banned", "_counts", "_position", "_prompt", "_seen", "params", "seed")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        banned: frozenset[int],
        seed: int,
    ) -> None:
        self.params = params
        self.seed = (params.seed if params.seed is not None else seed) & _MASK64
        self._banned = torch.tensor(sorted(banned), dtype=torch.int64) if banned else None
        self._position = 0
        self._prompt = prompt_token_ids if _penalised(params) else ()
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """True when the next token is the argmax of the raw logits."""
        params = self.params
        return (
            params.temperature == 0
            and not params.logit_bias
            and not _penalised(params)
            and not self._must_go_on
        )

    @property
    def depends_on_tokens(self) -> bool:
        """True when what is sampled next depends on the tokens sampled before, not only on how
        many they are."""
        return _penalised(self.params)

    @property
    def _must_go_on(self) -> bool:
        return self._banned is not None and self._position < self.params.min_tokens

    def draw(self) -> float:
        """The uniform number in [0, 1) for the token at this position, a hash of seed and position.

        SplitMix64 (Steele, Lea and Flood, 2014), read at an index.
        """
        value = (_mix64(self.seed) + (self._position + 1) * 0x9E3779B97F4A7C15) & _MASK64
        return (_mix64(value) >> 11) * 2.0**-53

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply bias and penalties to this request's row, (vocab,) fp32, in place."""
        params = self.params
        if _penalised(params):
            counts, seen = self._history(logits)
            if params.repetition_penalty != 1.0:
                factor = params.repetition_penalty
                scaled = torch.where(logits > 0, logits / factor, logits * factor)
                torch.where(seen, scaled, logits, out=logits)
            if params.frequency_penalty or params.presence_penalty:
                logits -= params.frequency_penalty * counts
                logits -= params.presence_penalty * (counts > 0)
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if self._must_go_on:
            logits[self._banned] = -torch.inf

    def advance(self) -> None:
        """A token was sampled that no later one depends on."""
        self._position += 1

    def observe(self, token: int) -> None:
        """Count a sampled token."""
        self._position += 1
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True

    def _history(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Occurrences in the output, and presence in prompt or output; (vocab,) each."""
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt, dtype=torch.int64)] = True
        return self._counts, self._seen


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, and its log-probability if it was asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Started:
    """Tokens that have been chosen on the device, and may not have reached the host yet.

    :param tokens: (rows,) int64 on the device of the logits.
    """

    __slots__ = ("_copy", "_ready", "_sampled", "tokens")

    def __init__(self, tokens: torch.Tensor, sampled: list[Sampled] | None) -> None:
        self.tokens = tokens
        self._sampled = sampled
        self._copy, self._ready = tokens, None
        if sampled is None and tokens.device.type == "cuda":
            self._copy = torch.empty_like(tokens, device="cpu", pin_memory=True)
            self._copy.copy_(tokens, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def wait(self) -> list[Sampled]:
        """One for each row. Waits for the device if need be."""
        if self._sampled is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._sampled = [Sampled(token) for token in self._copy.tolist()]
        return self._sampled


def start_sampling(logits: torch.Tensor, states: Sequence[SamplingState]) -> Started:
    """:func:`sample` without waiting for the device where nothing on the host needs the tokens.

    That is so when every row is plain greedy and wants no log-probabilities.
    """
    if all(state.is_plain_greedy and state.params.logprobs is None for state in states):
        for state in states:
            state.advance()
        return Started(logits.argmax(dim=-1), None)
    sampled = sample(logits, states)
    tokens = torch.tensor([each.token_id for each in sampled], device=logits.device)
    return Started(tokens, sampled)


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    """Choose a token for each row.

    Row i belongs to ``states[i]``, which is told the token. Log-probabilities are those of the raw
    logits, before temperature, penalties and bias.

    :param logits: (rows, vocab) fp32; may be changed.
    """
    logprobs = _logprobs(logits, states)
    plain = [state.is_plain_greedy for state in states]
    if all(plain):
        tokens = logits.argmax(dim=-1).tolist()
    else:
        for row, state in enumerate(states):
            if not plain[row]:
                state.adjust(logits[row])
        tokens = logits.argmax(dim=-1).tolist()
        rows = [row for row, state in enumerate(states) if state.params.temperature > 0]
        if rows:
            drawn = _draw(logits[rows], [states[row] for row in rows])
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
    sampled = []
    for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
        state.observe(token)
        found = logprobs.get(row)
        sampled.append(Sampled(token, None if found is None else _report(found, token, state)))
    return sampled


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Invert each row's cumulative distribution at its request's random number."""
    scale = torch.tensor([[max(state.params.temperature, _COLDEST)] for state in states])
    probs = (logits / scale.to(logits)).softmax(dim=-1)
    for row, state in enumerate(states):
        if _filtered(state.params):
            _filter(probs[row], state.params)
    cumulative = probs.double().cumsum(dim=-1)
    points = torch.tensor([[state.draw()] for state in states], dtype=torch.float64)
    points = points.to(cumulative.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    # Rounding can put the point on the last sum: step back to a token with probability.
    last = probs.shape[-1] - 1 - probs.flip(-1).ne(0).int().argmax(dim=-1)
    chosen: list[int] = torch.minimum(tokens, last).tolist()
    return chosen


def _filter(probs: torch.Tensor, params: SamplingParams) -> None:
    """Zero the probabilities that top-k, top-p or min-p drop; (vocab,), in place.

    In vLLM's order: top-k, then top-p within what is left, then min-p.
    """
    vocab = probs.shape[-1]
    kept = min(params.top_k or vocab, vocab)
    if kept < vocab or params.top_p < 1:
        values, ids = _likeliest(probs, kept, params.top_p)
        probs.zero_()
        probs[ids] = values
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0


def _likeliest(probs: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest tokens, at least one, with ``top_p`` of the ``top_k`` likeliest ones' mass."""
    if top_k > _CANDIDATES:
        mass = probs.sum() if top_k >= probs.shape[-1] else probs.topk(top_k).values.sum()
        values, ids = probs.topk(_CANDIDATES)
        if values.sum() < top_p * mass:
            values, ids = probs.topk(top_k)
    else:
        values, ids = probs.topk(top_k)
        mass = values.sum()
    before = values.cumsum(dim=-1) - values
    count = max(int((before < top_p * mass).sum()), 1)
    return values[:count], ids[:count]


def _logprobs(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, torch.Tensor]:
    """Raw log-probabilities of the rows that asked for them, (vocab,) each."""
    rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    if not rows:
        return {}
    return dict(zip(rows, logits[rows].log_softmax(dim=-1), strict=True))


def _report(logprobs: torch.Tensor, token: int, state: SamplingState) -> TokenLogprobs:
    count = state.params.logprobs or 0
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)


def _penalised(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _filtered(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.top_k > 0 or params.min_p > 0


def _mix64(value: int) -> int:
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
