"""One request as the scheduler sees it: token ids, counts and the blocks it holds.

Owns no policy. It does not know what a token means, how it was sampled, or who asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import FinishReason
from .prefix import PrefixCursor


class Sequence:
    """A request's tokens and where their keys and values are kept; compared by identity.

    The key and value of token ``i`` are in slot ``i % block_size`` of block
    ``block_ids[i // block_size]`` for every ``i < num_computed``. Only the scheduler changes a
    sequence once it has been added.

    :param request_id: unique among the requests that have not ended.
    :param prompt_token_ids: at least one.
    :param max_tokens: the most tokens to generate; ``None`` is up to the context limit.
    :param stop_token_ids: each ends the output once ``min_tokens`` tokens came before it.
    :param min_tokens: stop tokens are ignored until this many tokens have been generated.
    :param cache_salt: sequences share cached blocks only if their salts are equal.
    :param priority: lower numbers are served earlier.
    """

    __slots__ = (
        "block_ids",
        "cache_salt",
        "cursor",
        "finish_reason",
        "last_batch",
        "limit",
        "max_tokens",
        "min_tokens",
        "num_cached",
        "num_computed",
        "num_known",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled",
        "order",
        "paused",
        "priority",
        "rank",
        "request_id",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        *,
        max_tokens: int | None,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = stop_token_ids
        self.cache_salt = cache_salt
        self.priority = priority
        # Prompt and output together.
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        # Tokens whose keys and values are in the cache; 0 while waiting.
        self.num_computed = 0
        # The same once every batch handed out has run, and with those it will have sampled. They
        # differ from num_computed and num_tokens only while a batch is under way.
        self.num_scheduled = 0
        self.num_known = self.num_prompt_tokens
        # Prompt tokens that the prefix cache served when the sequence first ran.
        self.num_cached = 0
        self.num_preemptions = 0
        # Nobody reads what it generates, so it is to generate nothing.
        self.paused = False
        self.block_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        # The stop token id that ended the output, if one did.
        self.stop_reason: int | None = None
        # The scheduler's own bookkeeping: the most tokens it may have; the number of the last batch
        # it was in; its place among running sequences, (rank, order), where order counts admissions
        # and is -1 before the first; and its place in the prefix index, None where that is off.
        self.limit = 0
        self.last_batch = 0
        self.rank: float = priority
        self.order = -1
        self.cursor: PrefixCursor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.finish_reason is not None

    def append(self, token: int) -> FinishReason | None:
        """Take in a sampled token; why it ends the sequence, if it does."""
        self.token_ids.append(token)
        if token in self.stop_token_ids and self.num_output_tokens > self.min_tokens:
            self.stop_reason = token
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    def __repr__(self) -> str:
        state = self.finish_reason or f"{self.num_computed} computed"
        return f"<Sequence {self.request_id!r}: {self.num_tokens} tokens, {state}>"
