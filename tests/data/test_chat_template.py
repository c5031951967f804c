"""Templates render as in transformers, and say which of the text is learned."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megalith.data.chat_template import BUILT_IN, ChatTemplate, TextPiece, find_template
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import DataError

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be <b>brief</b>"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
WITHOUT_BLOCKS = """{% for message in messages %}
    {%- if message.role == 'user' and loop.index0 > 1 and messages[loop.index0 - 1].role == 'user' %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '[' + message.role + ']' + message.content | trim + eos_token -}}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
MANY_FEATURES = """{% set ns = namespace(n=0) %}{{ bos_token }}{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{% set ns.n = ns.n + 1 %}
  {% if ns.n > 3 %}
  {% break %}
  {% endif %}
{{ ns.n }}: {{ {"c": m.content, "é": 1} | tojson(indent=1) }} {{ strftime_now("%Y-%m") }}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""


LOOP_FEATURES = """{% for m in messages recursive %}{% if m.role %}{{ loop.length }}{{ loop.revindex0 }}{{ loop.last }}
{{- loop.previtem is defined }}{{ (loop.nextitem is defined) ~ 1 ~ none }}{{ loop.cycle('a', 'b') }}
{{- loop(m.content | list) }}{% else %}{{ m }}{{ loop.depth }}{% endif %}{% else %}none{% endfor %}
{%- for x in missing %}{% else %}empty{% endfor %}
{%- macro f(a, b=2) %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ f(1) }}{% call f(3) %}in{% endcall %}
{%- set text %}{{ messages | map(attribute='role') | unique | join(', ') }}{% endset %}{{ text | upper }}
{%- set rest = messages[1:] %}{{ rest | length }}{{ 'x' * 3 }}{{ 2 ** 3 * 4 % 5 }}{{ '%s-%d' % ('a', 3) }}
{{- [1] + [2] }}
{{- '{:>4}'.format(7) }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a' in text }}
{{- {'k': [1, {'z': 2}]} | tojson(indent=2) }}{{ messages[0].items() | list }}
{{- range(3) | sum }}{{ text | indent(2) }}"""


def learned(template: ChatTemplate, talk: list[dict[str, Any]] = TALK) -> list[str]:
    return [piece.text for piece in template.pieces(talk) if piece.learned]


@pytest.mark.parametrize(
    "source", [*BUILT_IN.values(), WITHOUT_BLOCKS, MANY_FEATURES, LOOP_FEATURES]
)
@pytest.mark.parametrize("prompt", [False, True])
def test_rendered_text_matches_transformers(source: str, prompt: bool) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    tools = [{"name": "f", "text": "<&>"}]
    (expected,), _ = reference(
        [TALK], tools=tools, chat_template=source, add_generation_prompt=prompt, **specials
    )
    assert ChatTemplate("t", source, specials).render(TALK, tools=tools, prompt=prompt) == expected


def test_generation_blocks_are_trained_on_and_the_parts_join_to_the_text() -> None:
    template = ChatTemplate("chatml", BUILT_IN["chatml"])
    assert learned(template) == ["yo<|im_end|>", "no<|im_end|>"]
    assert "".join(piece.text for piece in template.pieces(TALK)) == template.render(TALK)
    assert template.turn_end() == "<|im_end|>"
    assert ChatTemplate("llama3", BUILT_IN["llama3"]).turn_end() == "<|eot_id|>"


SPOKEN: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. /no_think\n"},
    {"role": "user", "content": "/think hi\n"},
    {"role": "assistant", "content": "\n yo /think "},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "a\nb"},
]


@pytest.mark.parametrize(
    ("name", "text", "answers", "prompt"),
    [
        (
            "nemotron-h-aligned",
            "<SPECIAL_10>System\nBe brief. /no_think\n<SPECIAL_11>User\n/think "
            "hi\n<SPECIAL_11>Assistant\nyo /think\n"
            "<SPECIAL_11>User\nmore\n<SPECIAL_11>Assistant\na\nb\n",
            ["yo /think\n", "a\nb\n"],
            "",
        ),
        (
            "nemotron-nano-v2",
            "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nhi\n<SPECIAL_11>Assistant\nyo "
            "/think\n<SPECIAL_12>\n"
            "<SPECIAL_11>User\nmore\n<SPECIAL_11>Assistant\na\nb\n<SPECIAL_12>\n",
            ["yo /think\n<SPECIAL_12>\n", "a\nb\n<SPECIAL_12>\n"],
            "<SPECIAL_11>Assistant\n",
        ),
    ],
)
def test_nemotron_formats_match_megatron(
    name: str, text: str, answers: list[str], prompt: str
) -> None:
    template = ChatTemplate(name, BUILT_IN[name])
    assert template.render(SPOKEN) == text and learned(template, SPOKEN) == answers
    assert template.render(SPOKEN[:-1], prompt=True) == template.render(SPOKEN[:-1]) + prompt
    assert template.render(SPOKEN).startswith(template.render(SPOKEN[:-1], prompt=True))
    assert template.turn_end() == ("<SPECIAL_12>" if prompt else "")
    with pytest.raises(
        DataError, match=rf"{name}: .*it has no words for the role tool.*or another template"
    ):
        template.render([*SPOKEN[:2], {"role": "tool", "content": "7"}])


def test_turns_without_generation_blocks_are_trained_on_after_the_prompt() -> None:
    template = ChatTemplate("t", WITHOUT_BLOCKS, {"eos_token": "</s>"})
    assert learned(template) == ["yo</s>", "no</s>"]
    assert template.pieces(TALK)[0] == TextPiece(
        "[system]be <b>brief</b></s>[user]hi</s>[assistant]", False
    )
    no_prompt = ChatTemplate("t", WITHOUT_BLOCKS.split("{%- if add")[0], {"eos_token": "</s>"})
    assert learned(no_prompt) == ["[assistant]yo</s>", "[assistant]no</s>"], (
        "no one else writes its header"
    )


@pytest.mark.parametrize("source", [BUILT_IN["identity"], WITHOUT_BLOCKS])
def test_a_message_can_be_left_out(source: str) -> None:
    talk = [*TALK[:2], {**TALK[2], "train": False}, *TALK[3:]]
    template = ChatTemplate("t", source, {"eos_token": "</s>"})
    assert learned(template, talk) == ["no</s>"]
    assert template.render(talk) == template.render(TALK), "templates do not see it"


def test_template_that_removes_earlier_turns_is_rejected_with_the_first_difference() -> None:
    forgets = (
        "{% for m in messages %}{{ '[' + m.role + ']' + (m.content if loop.last or m.role "
        "== 'user' else '-') }}"
    )
    template = ChatTemplate("t.jinja", forgets + "{% endfor %}")
    message = (
        r"t.jinja: the text of the first 3 messages is not a prefix .* at character \d+ it has "
        r"'yo', the whole text has '-.user"
    )
    with pytest.raises(DataError, match=message):
        template.pieces(TALK)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('no tools here') }}",
            r"t: the chat template rejects .*TemplateError: no tools here",
        ),
        (
            "{{ messages[99].content }}",
            r"t: the chat template rejects the conversation \(UndefinedError",
        ),
        (
            "{{ messages.append(1) }}",
            r"t: the chat template rejects the conversation \(SecurityError",
        ),
        (
            "{{ ''.__class__.__mro__ }}",
            r"t: the chat template rejects the conversation \(SecurityError",
        ),
        (
            "{% for %}",
            r"^t: not a Jinja template \(TemplateSyntaxError: .*Use the file that came with the "
            r"model",
        ),
    ],
)
def test_templates_that_fail_or_are_unsafe_are_reported(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatTemplate("t", source).render(TALK)


LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
GROW = "{% set x = 'a' * 1000 %}"
TRIPLE = "{% set x = [0] %}" + "{% set x = [x, x, x] %}" * 40  # 3**40 items, most of them shared
TUPLES = "{% set x = (0,) %}" + "{% set x = (x, x, x) %}" * 40
TWICE = TRIPLE + TRIPLE.replace("x", "y")


@pytest.mark.parametrize(
    "source",
    [
        LOOP + LOOP + "x" + END + END,
        LOOP + "{% for j in range(99999) if false %}{% endfor %}" + END,
        "{% for i in [[1, 2]] recursive %}{{ loop([[1, 2]] * 99999) }}{% endfor %}",
        LOOP + "x" * 60_000 + END,
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ "
        "f(60) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ range(10**4) | list | tojson(indent='x' * 10**6) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**5000 }}",
        "{{ (10**5000) | string }}",
        "{% set n = namespace(x=9) %}" + LOOP + "{% set n.x = n.x * n.x %}" + END,
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10**9) }}",
        "{{ '{x:>9999999999}'.format_map({'x': 1}) }}",
        "{{ ('x\n' * 100000) | indent(10**6) }}",
        GROW + "{% set x = x ~ x %}" * 40,
        GROW + "{% set x = x + x %}" * 40,
        GROW + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
        TRIPLE + "{{ x }}",
        TRIPLE + "{{ x | tojson }}",
        TRIPLE + "{{ [x] | map('string') | list }}",
        TRIPLE + "{{ x ~ '' }}",
        TRIPLE + "{% set n = namespace(x=x) %}{{ n }}",
        TWICE + "{{ x == y }}",
        TWICE + "{{ x is eq(y) }}",
        TUPLES + "{{ {x: 1} }}",
        TUPLES + "{{ {}[x] }}",
        "{{ range(99999) | map('string') | join('x' * 10**6) }}",
        "{{ ('x' * 10**6).join(range(9999) | map('string')) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
        "{% set x = [0] * 100000 %}" + LOOP + "{% set y = x[:] %}" + END,
        "{% set x = 'a' * 30000 %}" + LOOP + "{% if x.count('a' * 9000 + 'b') %}{% endif %}" + END,
    ],
)
def test_template_that_takes_too_much_time_or_memory_is_stopped(source: str) -> None:
    with pytest.raises(
        DataError, match=r"^t: the chat template rejects the conversation \(TemplateLimitError: .*"
    ):
        ChatTemplate("t", source).render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
        "{% for i in [1] %}" * 30 + END * 30,
        "{{ 'a'" + " | upper" * 10_000 + " }}",
        "x" * 200_000,
    ],
)
def test_template_that_cannot_be_compiled_is_rejected(source: str) -> None:
    with pytest.raises(
        DataError, match=r"^t: not a Jinja template \(\w+: .*Use the file that came with the model"
    ):
        ChatTemplate("t", source).render(TALK)


def test_constant_expressions_are_not_computed_when_a_template_is_compiled() -> None:
    expressions = ["(10**5000) | string", "10**10**10", "'a' * 10**10", "'a' | center(10**10)"]
    source = (
        "{% if false %}"
        + "".join(f"{{{{ {expression} }}}}" for expression in expressions)
        + "{% endif %}"
    )
    assert ChatTemplate("t", source).render(TALK) == ""


def test_long_conversation_renders_within_limits() -> None:
    talk = [
        {"role": role, "content": "some text " * 100}
        for _ in range(500)
        for role in ("user", "assistant")
    ]
    for source in (
        BUILT_IN["nemotron-nano-v2"],
        MANY_FEATURES,
        LOOP_FEATURES.replace("m.content | list", "[1]"),
    ):
        assert len(ChatTemplate("t", source).render(talk)) > 30


def test_train_needs_a_block_for_each_turn() -> None:
    one = "{% generation %}{{ messages[2].content }}{% endgeneration %}"
    assert learned(ChatTemplate("t", one)) == ["yo"]
    with pytest.raises(
        DataError, match=r't: 1 generation blocks for 2 assistant turns.*or remove "train"'
    ):
        ChatTemplate("t", one).pieces([*TALK[:4], {**TALK[4], "train": False}])


def test_strftime_now_returns_the_configured_date() -> None:
    source = '{{ strftime_now("%d %b %Y") }}'
    assert ChatTemplate("t", source, today=datetime(2024, 7, 26)).render([]) == "26 Jul 2024"
    assert (
        ChatTemplate("t", source).fingerprint
        != ChatTemplate("t", source, today=datetime(2024, 7, 26)).fingerprint
    )


def test_template_of_the_tokenizer_is_found_in_every_location(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    bytes_ = ByteTokenizer()

    def found(wanted: str | None = None) -> ChatTemplate:
        return find_template(wanted, bytes_, str(tmp_path), setting="data.sft.template")

    def say(template: object) -> None:
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(settings | {"chat_template": template})
        )

    with pytest.raises(
        DataError, match=r"has no chat template. Put one into .*chat_template.jinja, or under"
    ):
        found()
    say(
        [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "a{{ eos_token }}"},
        ]
    )
    assert found().render([]) == "a</s>"
    say("b{{ bos_token }}")
    assert found().render([]) == "b<s>"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert found().render([]) == "c", "the file of its own comes first, as in transformers"
    assert found("chatml").source == BUILT_IN["chatml"]
    (tmp_path / "mine.jinja").write_text("d")
    assert found(str(tmp_path / "mine.jinja")).render([]) == "d"
    with pytest.raises(
        DataError, match=r"data.sft.template=chatlm: No such file.* Did you mean .*chatml"
    ):
        found("chatlm")
    assert find_template("identity", bytes_, None, setting="x").specials == {
        "eos_token": "<|endoftext|>"
    }


def test_tokenizer_config_that_is_nested_too_deeply_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(DataError, match=r"tokenizer_config.json: not JSON \(.*nested too deeply\)"):
        find_template(None, ByteTokenizer(), str(tmp_path), setting="data.sft.template")


def test_template_that_links_to_a_device_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").symlink_to("/dev/zero")
    with pytest.raises(
        DataError, match=r"data.sft.template=.*t.jinja: not a regular file, but a device"
    ):
        find_template(str(tmp_path / "t.jinja"), ByteTokenizer(), None, setting="data.sft.template")
