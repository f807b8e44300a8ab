"""Control tokens that no text can spell.

A chat template mixes its own markers (``<|im_end|>``) with text from outside. Were the result
tokenised as usual, a message that contains a marker, or completes one that the template began,
could end its own turn and forge another. So each control token gets a secret spelling, made of a
random nonce: templates are compiled with it (:mod:`.literals`), and a second tokenizer recognises
it alone. Whatever else looks like a marker is plain text. No message is searched or changed.

Some templates put a marker together: ``'<|' + message.role + '|>'``. The parts, from the template's
literals and from a role of a fixed list, carry secret tags; only parts that are tagged and adjacent
join to a marker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken

TRUSTED_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"}
)
"""Roles that may take part in a marker that a template puts together."""


class ControlSpelling:
    """The secret spellings of some control tokens; one instance lives as long as a tokenizer."""

    def __init__(self, tokens: Collection[str], *, nonce: str) -> None:
        """Choose spellings for ``tokens``; ``nonce`` is a secret of at least 128 bits, in hex."""
        ordered = sorted(tokens)
        self._secret = {token: f"{nonce}c{index}z" for index, token in enumerate(ordered)}
        self._token = {secret: token for token, secret in self._secret.items()}
        self._open, self._close = f"{nonce}o", f"{nonce}e"
        self._secrets = re.compile(re.escape(nonce) + r"c\d+z")
        tagged = f"{self._open}(?:(?!{nonce}).)*{self._close}"
        self._runs = re.compile(f"(?:{tagged})+", re.DOTALL)
        halves = {token: _around_role(token) for token in ordered}
        self._composable = [token for token, pairs in halves.items() if pairs]
        self._heads = _longest_first({head for pairs in halves.values() for head, _ in pairs})
        self._tails = _longest_first({tail for pairs in halves.values() for _, tail in pairs})

    def secret(self, token: str) -> str:
        """The spelling under which ``token`` is recognised."""
        return self._secret[token]

    def filler(self, index: int) -> str:
        """A spelling of nothing: to take up a number."""
        return f"{self._open}{index}{self._close}"

    def trust(self, literal: str) -> str:
        """Spell the control tokens in a template's own literal, and tag what may become one."""
        head = tail = ""
        spelled = self._spell(literal, self._secret)
        for end in self._heads:
            if spelled.endswith(end):
                spelled, head = spelled[: -len(end)], self._tag(end)
                break
        for start in self._tails:
            if spelled.startswith(start):
                spelled, tail = spelled[len(start) :], self._tag(start)
                break
        return tail + spelled + head

    def trust_role(self, role: str) -> str:
        """A role for a template: tagged where it is printed, if it is a well-known one."""
        return _TrustedRole(role, self._tag(role)) if role in TRUSTED_ROLES else role

    def resolve(self, rendered: str) -> str:
        """Join the tagged parts of a rendered prompt, leaving secrets and plain text."""
        return self._runs.sub(
            lambda run: self._spell(self._untag(run[0]), self._composable), rendered
        )

    def reveal(self, text: str) -> str:
        """Undo every spelling and tag, for text that people read."""
        return self._secrets.sub(lambda found: self._token.get(found[0], ""), self._untag(text))

    def _spell(self, text: str, tokens: Iterable[str]) -> str:
        present = _longest_first({token for token in tokens if token in text})
        if not present:
            return text
        pattern = "|".join(re.escape(token) for token in present)
        return re.sub(pattern, lambda found: self._secret[found[0]], text)

    def _tag(self, part: str) -> str:
        return f"{self._open}{part}{self._close}"

    def _untag(self, text: str) -> str:
        return text.replace(self._open, "").replace(self._close, "")


class _TrustedRole(str):
    """A role that compares and hashes as its name, and prints with its tag."""

    __slots__ = ("_tagged",)

    _tagged: str

    def __new__(cls, role: str, tagged: str) -> _TrustedRole:
        self = super().__new__(cls, role)
        self._tagged = tagged
        return self

    def __str__(self) -> str:
        return self._tagged

    def __format__(self, spec: str) -> str:
        return format(self._tagged, spec)

    def __add__(self, other: str) -> str:
        return self._tagged + other

    def __radd__(self, other: str) -> str:
        return other + self._tagged


@dataclass(frozen=True, slots=True)
class Guard:
    """A tokenizer over the same model that knows control tokens by their secrets alone.

    ``renumbered`` maps its own ids of added tokens to the real ones, where they differ.
    ``forbidden`` are control tokens among the model's own pieces: no secret has these ids, so one
    that comes out was merged from text.
    """

    backend: tokenizers.Tokenizer
    renumbered: Mapping[int, int]
    forbidden: frozenset[int]


def guard(backend: tokenizers.Tokenizer, control: ControlSpelling) -> Guard:
    """Build the guarded counterpart of a tokenizer; they share the model, which is most of it."""
    added = sorted(backend.get_added_tokens_decoder().items())
    tokens = [_guarded_token(token, control) for _, token in added]
    real = {token.content: i for token, (i, _) in zip(tokens, added, strict=True)}
    bare = tokenizers.Tokenizer(backend.model)
    guarded = _with_added(backend, tokens)
    if _numbers_clash(guarded, bare):
        # A vocabulary with gaps: the numbers of added tokens must start beyond its last.
        missing = max(bare.get_vocab().values()) + 1 - bare.get_vocab_size()
        filler = [AddedToken(control.filler(index)) for index in range(missing)]
        guarded = _with_added(backend, [*filler, *tokens])
    numbers = guarded.get_added_tokens_decoder()
    return Guard(
        backend=guarded,
        renumbered={
            i: real[token.content]
            for i, token in numbers.items()
            if real.get(token.content, i) != i
        },
        forbidden=frozenset(
            i for i, token in added if token.special and bare.id_to_token(i) is not None
        ),
    )


def _guarded_token(token: AddedToken, control: ControlSpelling) -> AddedToken:
    return AddedToken(
        control.secret(token.content) if token.special else token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )


def _with_added(backend: tokenizers.Tokenizer, tokens: list[AddedToken]) -> tokenizers.Tokenizer:
    guarded = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        guarded.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        guarded.pre_tokenizer = backend.pre_tokenizer
    guarded.add_tokens(tokens)
    return guarded


def _numbers_clash(guarded: tokenizers.Tokenizer, bare: tokenizers.Tokenizer) -> bool:
    """Whether an added token got a number that a piece of the model has."""
    return any(
        bare.id_to_token(i) not in (None, token.content)
        for i, token in guarded.get_added_tokens_decoder().items()
    )


def _around_role(token: str) -> list[tuple[str, str]]:
    """What stands before and after each well-known role in a control token."""
    parts = (token.partition(role) for role in sorted(TRUSTED_ROLES) if role in token)
    return [(head, tail) for head, _, tail in parts if head and tail]


def _longest_first(texts: Collection[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))
