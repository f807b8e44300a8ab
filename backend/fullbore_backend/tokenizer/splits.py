"""How byte-level vocabularies cut text before merging: one table, keyed by ``tokenizer.ggml.pre``.

The merges of a vocabulary were learned inside pieces cut by some regular expressions; other cuts
give other, worse tokens. GGUF names the cut and this table spells it out: each expression in turn
cuts the pieces left by the one before. They are those of the models' own ``tokenizer.json`` files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to cut text.

    :param patterns: regular expressions (Oniguruma), applied in turn.
    :param ignore_merges: a piece that is a token as a whole is taken as it is.
    :param add_bos: such models want a BOS token when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The cutter, which also turns bytes into the characters that stand for them."""
        cuts = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, spell])


_GPT2_SPLIT = Split(patterns=(_GPT2,))
_LLAMA3_SPLIT = Split(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_SPLIT = Split(patterns=(_QWEN2,))
_GPT4O_SPLIT = Split(patterns=(_GPT4O,))
_DIGITS_SPLIT = Split(patterns=(r"\p{N}", _GPT2))
_DEEPSEEK3_SPLIT = Split(patterns=(r"\p{N}{1,3}", _CJK, _DEEPSEEK3))

_FAMILIES: tuple[tuple[Split, tuple[str, ...]], ...] = (
    (
        _GPT2_SPLIT,
        ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat"),
    ),
    # llama.cpp and the original SmolLM files also set digits apart, which differs from this only
    # where two or more blanks precede a digit. This is how transformers reads these files.
    (_GPT2_SPLIT, ("smollm",)),
    (_DIGITS_SPLIT, ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")),
    (
        _LLAMA3_SPLIT,
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
    ),
    (Split(patterns=(_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (_QWEN2_SPLIT, ("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "megrez", "hunyuan")),
    (Split(patterns=(_QWEN35,)), ("qwen35",)),
    (Split(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (_GPT4O_SPLIT, ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_DEEPSEEK3_SPLIT, ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (
        Split(
            patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
        ),
        ("deepseek-coder",),
    ),
    (
        Split(patterns=(r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        ("falcon",),
    ),
)

SPLITS: Mapping[str, Split] = MappingProxyType(
    {name: split for split, names in _FAMILIES for name in names}
)
