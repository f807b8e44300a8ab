"""How likely a model finds given tokens: the one thing that every measure here is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidRequestError
from ..kernels import AttentionBatch
from ..runner import Runner


class Scorer:
    """Log-probabilities of the tokens of a text, by the model and the cache of a runner.

    :param runner: nothing else may use it meanwhile: its pages are written from the first on.
    :param chunk: tokens computed at a time; their logits, ``chunk · vocab_size`` fp32, are held.
    """

    def __init__(self, runner: Runner, *, chunk: int = 256) -> None:
        self._runner = runner
        self._chunk = chunk
        self._num_blocks = len(runner.pages[0].k)
        self.max_tokens = self._num_blocks * runner.block_size
        """The longest text that the cache holds."""

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """The natural logarithm of each token's probability after those before it.

        :param start: the first token that is asked for, at least 1; what is before is context.
        :raises InvalidRequestError: the text is longer than the cache.
        """
        if not 1 <= start <= len(token_ids):
            raise InvalidRequestError(
                f"start is {start}; a first token has no context, and {len(token_ids)} were given.",
                param="start",
            )
        if len(token_ids) > self.max_tokens:
            raise InvalidRequestError(
                f"{len(token_ids)} tokens do not fit the cache's {self.max_tokens}.", param="text"
            )
        found: list[float] = []
        last = len(token_ids) - 1  # is predicted, and predicts nothing
        for begin in range(0, last, self._chunk):
            end = min(begin + self._chunk, last)
            first = max(begin, start - 1)
            if first >= end:
                first = end  # context alone: no logits
            logits = self._forward(token_ids, begin, end, first)
            wanted = torch.tensor(token_ids[first + 1 : end + 1], device=logits.device)
            chosen = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            found += chosen.tolist()
        return found

    def _forward(self, token_ids: Sequence[int], begin: int, end: int, first: int) -> torch.Tensor:
        """Compute tokens ``begin`` to ``end``; logits of those from ``first`` on, fp32."""
        runner = self._runner
        size, device = runner.block_size, runner.device
        batch = AttentionBatch.build(
            query_lens=[end - begin],
            context_lens=[end],
            block_tables=[list(range(-(-end // size)))],
            block_size=size,
            device=device,
        )
        logits: torch.Tensor = runner.model(
            torch.tensor(token_ids[begin:end], device=device),
            torch.arange(begin, end, device=device),
            torch.arange(first - begin, end - begin, device=device),
            runner.pages,
            batch,
        )
        return logits
