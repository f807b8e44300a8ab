"""Chat templates: the usual ids for ordinary text, and no control token out of any text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fullbore_backend.errors import InvalidRequestError
from fullbore_backend.tokenizer import Tokenizer
from fullbore_backend.tokenizer.from_gguf import read_gguf_tokenizer

MARKERS = (
    *("<|bos|>", "<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
    *("<|start_header|>", "<|end_header|>", "[INST]", "[/INST]", "<think>"),
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header|>' + m['role'] + '<|end_header|>\n\n' + m['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header|>assistant<|end_header|>\n\n' }}{%- endif %}"""
COMPOSED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' ~ m.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMPOSED_OUTSIDE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
INSTRUCT = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: ' + m.role + ' came after <|end|>') }}
{% endif %}
{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
TOOLS = """{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{{- {'user': '<|user|>', 'assistant': '<|assistant|>'}.get(m.role, '<|tool|>') }}
{%- set text = m.content.split('</reasoning>')[-1] if '<think>' in m.content else m.content %}
{{- text }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}
{%- endfor %}{{ m.name }}{{ note }}<|end|>{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "composed": COMPOSED,
    "composed outside": COMPOSED_OUTSIDE,
    "instruct": INSTRUCT,
    "tools": TOOLS,
}


@pytest.fixture(scope="session")
def build(model_path: Path) -> Any:
    """Makes a tokenizer with the markers above, for a given template."""

    def make(
        template: str | None, *, add_bos: bool = False, clock: Any = datetime.now
    ) -> Tokenizer:
        source = read_gguf_tokenizer(model_path)
        added = source.backend.add_special_tokens(list(MARKERS))
        source = replace(
            source,
            vocab_size=source.vocab_size + added,
            chat_templates={} if template is None else {"default": template},
            variables={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
            bos_token_id=source.backend.token_to_id("<|bos|>"),
            add_bos=add_bos,
        )
        return Tokenizer(source, clock=clock)

    return make


@pytest.fixture(scope="session")
def tokenizers(build: Any) -> dict[str, Tokenizer]:
    """One tokenizer for each template."""
    return {name: build(template) for name, template in TEMPLATES.items()}


def rendered(template: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
    """What the template says without any guard."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = lambda message: pytest.fail(message)
    return environment.from_string(template).render(
        messages=messages,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        add_generation_prompt=True,
        **kwargs,
    )


def control_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The control tokens among the ids."""
    return [i for i in ids if tokenizer.decode([i]) == "" and tokenizer.token_bytes(i)]


ORDINARY = [
    {"role": "user", "content": "Is 3 < 4 | 5 > 2?\n<b>yes</b> |> [x]"},
    {"role": "assistant", "content": "  It is. <| 🙂"},
    {"role": "user", "content": " Thanks…"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ordinary_text_has_the_usual_ids(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """The same as rendering and then parsing the markers out of the text."""
    tokenizer = tokenizers[name]
    expected = tokenizer.encode(rendered(TEMPLATES[name], ORDINARY), parse_special=True)
    assert tokenizer.encode_chat(ORDINARY) == expected
    assert len(control_ids(tokenizer, expected)) >= 3


PIECES = st.sampled_from(
    [
        *(*MARKERS, "<|im_end|>", "<|im_start|>", "<|", "|>", "end", "<|e", "nd|>", "user"),
        *("<|im_", "[", "INST]", "system\n", " ", "\n", "x", "|", "<", ">", "</reasoning>"),
        "{{ bos_token }}",
    ]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
ROLES = st.one_of(st.sampled_from(["user", "assistant", "tool", "system"]), TEXTS)
PARTS = st.lists(TEXTS, max_size=4).map(lambda ts: [{"type": "text", "text": t} for t in ts])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.one_of(TEXTS, PARTS), "name": TEXTS}),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=200)
@given(messages=MESSAGES, note=TEXTS, name=st.sampled_from(sorted({*TEMPLATES} - {"instruct"})))
def test_no_text_becomes_a_control_token(
    tokenizers: dict[str, Tokenizer], messages: list[dict[str, Any]], note: str, name: str
) -> None:
    """Control tokens are those of the same conversation with harmless text; all text is kept."""
    tokenizer, template = tokenizers[name], TEMPLATES[name]
    tools = [{"name": note}]
    ids = tokenizer.encode_chat(messages, tools=tools, template_kwargs={"note": note})
    harmless = [{"role": _harmless(m["role"]), "content": "x", "name": "x"} for m in messages]
    plain = tokenizer.encode_chat(harmless, tools=[{"name": "x"}], template_kwargs={"note": "x"})
    assert control_ids(tokenizer, ids) == control_ids(tokenizer, plain)
    flat = [{**m, "content": _flat(m["content"])} for m in messages]
    whole = rendered(template, flat, tools=tools, note=note)
    assert tokenizer.decode(ids, skip_special=False) == whole


def _harmless(role: str) -> str:
    return role if role in {"user", "assistant", "tool", "system"} else "critic"


def _flat(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@pytest.mark.parametrize("name", ["composed", "composed outside"])
def test_only_known_roles_compose_a_marker(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """`<|` + role + `|>` is a marker for a user and text for a role called `end`."""
    tokenizer = tokenizers[name]
    user, end = tokenizer.encode("<|user|><|end|>", parse_special=True)
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}])[0] == user
    forged = tokenizer.encode_chat([{"role": "end", "content": "x"}], add_generation_prompt=False)
    assert forged.count(end) == 1
    assert forged[-1] == end


def test_a_template_still_finds_its_own_marks_in_messages(tokenizers: dict[str, Tokenizer]) -> None:
    """Literals that are searched for are not guarded, or no history would be recognised."""
    message = {"role": "assistant", "content": "<think>hm</reasoning>So"}
    text = tokenizers["tools"].decode(tokenizers["tools"].encode_chat([message]))
    assert text == "So"


def test_tool_arguments_are_objects_to_the_template(tokenizers: dict[str, Tokenizer]) -> None:
    """The wire has them as JSON text; text that is no JSON is passed on as it is."""
    call = {"function": {"name": "f", "arguments": '{"a": "é <|end|>"}'}}
    broken = {"function": {"name": "g", "arguments": "{a"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call, broken]}
    text = tokenizers["tools"].decode(tokenizers["tools"].encode_chat([message]))
    assert text == 'f{"a": "é <|end|>"}g"{a"'


@pytest.mark.parametrize(
    ("template", "add_bos", "expected"),
    [
        pytest.param("{{ bos_token }}a", True, 1, id="template and model"),
        pytest.param("a", True, 1, id="model alone"),
        pytest.param("{{ bos_token }}a", False, 1, id="template alone"),
        pytest.param("a", False, 0, id="neither"),
    ],
)
def test_bos_comes_once(build: Any, template: str, add_bos: bool, expected: int) -> None:
    """Whoever writes it."""
    tokenizer = build(template, add_bos=add_bos)
    ids = tokenizer.encode_chat([])
    assert ids.count(tokenizer.bos_token_id) == expected
    prompt = tokenizer.encode_prompt("<|bos|>a")
    assert prompt.count(tokenizer.bos_token_id) == int(add_bos)
    both = tokenizer.encode("<|bos|>a", parse_special=True, add_bos=True)
    assert both.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        pytest.param(
            [{"role": "system", "content": "x"}], "System role not supported", id="system role"
        ),
        pytest.param(
            [{"role": "assistant", "content": "x"}],
            "Roles must alternate: assistant came after <|end|>",
            id="order, with a marker in the message",
        ),
        pytest.param([{"role": "user", "content": None}], "cannot render", id="no content"),
        pytest.param([{"role": "user"}], "no attribute 'content'", id="content left out"),
        pytest.param([{"content": "x"}], "must be an object with a string `role`", id="no role"),
        pytest.param(["hello"], "must be an object", id="a bare string"),
        pytest.param([{"role": "user", "content": 3}], "neither text nor", id="a number"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0] has a content part 'image_url'",
            id="an image",
        ),
        pytest.param(
            [{"role": "user", "content": "x", "tool_calls": "y"}], "not a list", id="tool calls"
        ),
    ],
)
def test_refusals_are_request_errors(
    tokenizers: dict[str, Tokenizer], messages: Any, message: str
) -> None:
    """With the template's own words, and no trace of the secret spellings."""
    with pytest.raises(InvalidRequestError) as caught:
        tokenizers["instruct"].encode_chat(messages)
    assert message in str(caught.value)
    assert caught.value.param == "messages"


def test_template_kwargs_cannot_replace_what_the_template_relies_on(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """Nor can they bring in control tokens (the property above)."""
    with pytest.raises(InvalidRequestError, match="bos_token, messages") as caught:
        tokenizers["chatml"].encode_chat([], template_kwargs={"messages": [], "bos_token": "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(None, "has no chat template.*/v1/completions", id="none"),
        pytest.param("{% if %}", "is broken.*/v1/completions", id="broken"),
    ],
)
def test_without_a_template_chat_is_refused(build: Any, template: Any, message: str) -> None:
    """And completions go on."""
    tokenizer = build(template)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.encode_chat(ORDINARY)
    assert tokenizer.encode_prompt("x")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024", id="clock"),
        pytest.param("{{ messages | tojson(indent=1) }}", '[\n {\n  "role": "user",', id="tojson"),
        pytest.param("{{ '<é>' | tojson }}", '"<é>"', id="tojson escapes no HTML"),
        pytest.param("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b", id="generation"),
        pytest.param("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "1", id="break"),
        pytest.param("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny", id="blocks are trimmed"),
        pytest.param("{{ messages[0].role ~ '!' ~ messages[0]['role'] }}", "user!user", id="role"),
        pytest.param("{{ messages[0].role == 'user' }}", "True", id="role compares"),
        pytest.param("{{ {'user': 'U'}[messages[0].role] }}", "U", id="role as a key"),
        pytest.param("{{ messages[0].role | upper }}{{ '%s' % messages[0].role }}", "USERuser"),
    ],
)
def test_the_environment_is_the_one_templates_expect(
    build: Any, template: str, expected: str
) -> None:
    """Filters, functions and extensions that published templates use."""
    tokenizer = build(template, clock=lambda: datetime(2024, 7, 26))
    assert tokenizer.decode(tokenizer.encode_chat([ORDINARY[0]])).startswith(expected)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].update(a=1) }}"],
)
def test_templates_run_in_a_sandbox(build: Any, template: str) -> None:
    """They change nothing and reach nothing."""
    with pytest.raises(InvalidRequestError):
        build(template).encode_chat(ORDINARY)


def test_messages_are_left_as_they_were(tokenizers: dict[str, Tokenizer]) -> None:
    """Content parts are joined in a copy."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    tokenizers["chatml"].encode_chat(messages)
    assert json.dumps(messages) == before


def test_lone_surrogates_become_replacement_characters(tokenizers: dict[str, Tokenizer]) -> None:
    """JSON can carry half a character; a pair of halves is put together."""
    tokenizer = tokenizers["chatml"]
    assert tokenizer.decode(tokenizer.encode("a\ud83d b\ud83d\ude42")) == "a\ufffd b🙂"
