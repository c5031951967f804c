"""Chat templates: render conversations as text, and select the text that is trained on.

A template is a Jinja program that comes with a model and runs in a sandbox. Templates have the same
variables and functions as in transformers, and render the same text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megalith import storage
from megalith.config.data import BUILT_IN_TEMPLATES
from megalith.data.huggingface import find_tokenizer_file
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError, did_you_mean

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# Noncharacters, which do not occur in interchanged text (Unicode 16.0, section 23.7).
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

BUILT_IN = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ '<|begin_of_text|>' }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' "
        "}}{% endif %}"
    ),
    "identity": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    ),
    # The user turn ends with the generation prompt; a newline ends the assistant turn.
    "nemotron-h-aligned": (
        "{% for message in messages %}{% set text = message['content'] | trim %}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ text + '\n' }}{% endgeneration "
        "%}{% elif message['role'] == 'user' %}{{ '<SPECIAL_11>User\n' + text + "
        "'\n<SPECIAL_11>Assistant\n' }}"
        "{% elif message['role'] == 'system' %}{{ '<SPECIAL_10>System\n' + text + '\n' }}"
        "{% else %}{{ raise_exception('it has no words for the role ' + message['role']) }}{% "
        "endif %}{% endfor %}"
    ),
    # /think and /no_think are options of the caller, and are not part of the prompt.
    "nemotron-nano-v2": (
        "{% for message in messages %}"  # lint: allow old-word: the source is part of fingerprints
        "{% set text = message['content'] | trim %}"
        "{% set told = message['content'] | replace('/think', '') | replace('/no_think', '') | "
        "trim %}{% if message['role'] == 'assistant' %}{{ '<SPECIAL_11>Assistant\n' }}"
        "{% generation %}{{ text + '\n<SPECIAL_12>\n' }}{% endgeneration %}"
        "{% elif message['role'] == 'user' %}{{ '<SPECIAL_11>User\n' + told + '\n' }}"
        "{% elif message['role'] == 'system' %}{{ '<SPECIAL_10>System\n' + told + '\n' }}"
        "{% else %}{{ raise_exception('it has no words for the role ' + message['role']) }}{% "
        "endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\n' }}{% endif %}"
    ),
}
assert set(BUILT_IN) == set(BUILT_IN_TEMPLATES)

Message = Mapping[str, Any]  # JSON


class TextPiece(NamedTuple):
    """Part of the rendered text, and whether it is trained on."""

    text: str
    learned: bool


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template with its special tokens and date."""

    name: str
    """Name in messages: the path of the file, or the name of a built-in template."""

    source: str
    specials: Mapping[str, str] = field(default_factory=dict)
    """Texts of special tokens by variable name, such as bos_token and eos_token."""

    today: datetime | None = None
    """Result of `strftime_now`; None: the current time."""

    @property
    def fingerprint(self) -> str:
        """Hash of the source, special tokens and date."""
        contents = json.dumps([self.source, dict(self.specials), str(self.today)])
        return f"template-{hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()}"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation; with `prompt`, add the generation prompt.

        `variables`: more variables of the template; they do not replace those above.

        Raises:
            DataError: the template raises an error.
        """
        text = self._render(messages, tools, prompt=prompt, more=variables or {})
        return text.replace(_OPEN, "").replace(_CLOSE, "")

    def pieces(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> list[TextPiece]:
        """Split the text of a conversation into parts that are trained on and parts that are not.

        The parts trained on are the template's generation blocks if it has any. Otherwise they are
        the assistant turns, from where the text differs from the generation prompt.

        Raises:
            DataError: the template fails, or the text of the first turns is not a prefix of the
                whole text.
        """
        marked = self._render(messages, tools, prompt=False)
        if _OPEN in marked:
            return self._marked_pieces(marked, messages)
        return self._turns(marked, messages, tools)

    def turn_end(self) -> str:
        """Return the first line that the template writes after an assistant turn; often a special
        token."""
        answer = "\x02"
        text = self.render(
            [{"role": "user", "content": "\x01"}, {"role": "assistant", "content": answer}]
        )
        return text.rpartition(answer)[2].strip().split("\n")[0].strip()

    def _marked_pieces(self, marked: str, messages: Sequence[Message]) -> list[TextPiece]:
        # each: text trained on, then the text after it
        parts = [part.partition(_CLOSE) for part in marked.split(_OPEN)]
        answers = [message for message in messages if message["role"] == "assistant"]
        if len(parts) - 1 != len(answers) and any("train" in message for message in answers):
            raise DataError(
                f"{self.name}: {len(parts) - 1} generation blocks for {len(answers)} assistant "
                "turns, so "
                '"train" of a message cannot be assigned to a block. Use one block per turn, or '
                'remove "train".'
            )
        flags = (
            [message.get("train", True) for message in answers]
            if len(parts) - 1 == len(answers)
            else []
        )
        pieces = [TextPiece(parts[0][0], False)]
        for number, (learned, _, rest) in enumerate(parts[1:]):
            pieces += [
                TextPiece(learned, bool(flags[number]) if flags else True),
                TextPiece(rest, False),
            ]
        return _merge_pieces(pieces)

    def _turns(
        self, whole: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[TextPiece]:
        ends, pieces = [0], []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt_text = self.render(messages[:number], tools=tools, prompt=True)
            turn_text = self.render(messages[: number + 1], tools=tools)
            if not whole.startswith(turn_text):
                index = _common_prefix_length(turn_text, whole)
                raise DataError(
                    f"{self.name}: the text of the first {number + 1} messages is not a prefix of "
                    "the "
                    "text of the whole conversation: at "
                    f"character {index} it has {turn_text[index : index + 30]!r}, the whole text "
                    "has "
                    f"{whole[index : index + 30]!r}. Use a template with generation blocks, or "
                    "conversations from whose earlier turns the template removes nothing."
                )
            ends += [max(_common_prefix_length(prompt_text, turn_text), ends[-1]), len(turn_text)]
        flags = [bool(m.get("train", True)) for m in messages if m["role"] == "assistant"]
        for number, (start, end) in enumerate(pairwise([*ends, len(whole)])):
            pieces.append(TextPiece(whole[start:end], number % 2 == 1 and flags[number // 2]))
        return _merge_pieces(pieces)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        prompt: bool,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        plain = [
            {name: value for name, value in message.items() if name != "train"}
            for message in messages
        ]
        environment, template = self._compiled
        variables = {
            **more,
            "messages": plain,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": prompt,
            **self.specials,
        }
        try:
            text: str = environment.render(template, variables)
        except Exception as error:  # an untrusted program may raise any exception
            raise DataError(
                f"{self.name}: the chat template rejects the conversation ({type(error).__name__}: "
                f"{error}). Use conversations of the format it expects, or another template."
            ) from error
        return text

    @cached_property
    def _compiled(
        self,
    ) -> tuple[Any, Any]:  # a TemplateEnvironment and a jinja2.Template: Jinja is optional
        try:
            from megalith.data.template_sandbox import build_environment
        except ImportError as error:
            raise DataError(
                f"chat templates need Jinja ({error}). Install it with pip install "
                '"megalith[chat]".'
            ) from error
        environment = build_environment(self.today, (_OPEN, _CLOSE))
        try:
            return environment, environment.compile_source(self.source)
        except (
            Exception
        ) as error:  # an untrusted program: Jinja and Python's compiler raise many kinds of errors
            raise DataError(
                f"{self.name}: not a Jinja template ({type(error).__name__}: {error!s:.300}). Use "
                f"the file that came with the model, or one of {', '.join(BUILT_IN)}."
            ) from error


def _common_prefix_length(a: str, b: str) -> int:
    """Return the number of characters in the common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _merge_pieces(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Merge adjacent pieces with the same flag and remove empty ones."""
    merged: list[TextPiece] = []
    for piece in pieces:
        if merged and merged[-1].learned == piece.learned:
            merged[-1] = TextPiece(merged[-1].text + piece.text, piece.learned)
        elif piece.text:
            merged.append(piece)
    return merged


def find_template(
    wanted: str | None,
    tokenizer: Tokenizer,
    tokenizer_path: str | None,
    *,
    setting: str,
    today: datetime | None = None,
) -> ChatTemplate:
    """Return the template that a setting selects, or the template of the tokenizer.

    `wanted`: value of the setting. `setting`: its name, for error messages.

    Raises:
        DataError: the file does not exist, or the tokenizer has no template.
    """
    settings = _tokenizer_settings(tokenizer_path)
    specials = _own_specials(tokenizer) | _specials(settings)
    if wanted in BUILT_IN:
        assert wanted is not None
        return ChatTemplate(wanted, BUILT_IN[wanted], specials, today)
    if wanted is not None:
        return ChatTemplate(wanted, _template_file(wanted, setting), specials, today)
    folder = _folder(tokenizer_path)
    if folder is not None and (folder / TEMPLATE_FILE).is_file():
        file = folder / TEMPLATE_FILE
        return ChatTemplate(str(file), _read_template(file), specials, today)
    own = _default_of(settings.get("chat_template"))
    if own is None:
        where = folder if folder is not None else "the tokenizer's folder"
        raise DataError(
            f"{tokenizer_path or 'the tokenizer'} has no chat template. Put one into "
            f"{where}/{TEMPLATE_FILE}, or under "
            f'"chat_template" in its {CONFIG_FILE}, or set {setting} to one of '
            f"{', '.join(BUILT_IN)} or a Jinja file."
        )
    return ChatTemplate(f"{folder}/{CONFIG_FILE}", own, specials, today)


def _read_template(file: Path) -> str:
    try:
        return storage.read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({error}). Use the file that came with the tokenizer."
        ) from error


def _template_file(wanted: str, setting: str) -> str:
    try:
        return storage.read_text(Path(wanted))
    except (OSError, UnicodeDecodeError) as error:
        advice = did_you_mean(wanted, BUILT_IN) or ""
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(
            f"{setting}={wanted}: {reason}.{advice} Set it to one of {', '.join(BUILT_IN)} or to a "
            "Jinja file."
        ) from error


def _folder(tokenizer_path: str | None) -> Path | None:
    if tokenizer_path is None:
        return None
    path = Path(tokenizer_path)
    if path.is_dir():
        return path
    return path.parent if path.is_file() else find_tokenizer_file(tokenizer_path).parent


def _tokenizer_settings(tokenizer_path: str | None) -> Mapping[str, Any]:  # JSON
    folder = _folder(tokenizer_path)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return {}
    file = folder / CONFIG_FILE
    try:
        settings = storage.parse_json(storage.read_bytes(file, max_nbytes=storage.MAX_TEXT_NBYTES))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: not JSON ({error}). Use the file that came with the tokenizer."
        ) from error
    return settings if isinstance(settings, dict) else {}


def _specials(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens, each stored as a text or as an object with
    `content`."""
    entries = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in entries.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _own_specials(tokenizer: Tokenizer) -> dict[str, str]:
    """Return bos_token and eos_token of the tokenizer."""
    texts = {number: text for text, number in tokenizer.specials.items()}
    try:
        ids = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eod}
    except DataError:  # no end-of-document token: eos_token is undefined in templates
        ids = {"bos_token": tokenizer.bos}
    return {name: texts[number] for name, number in ids.items() if number in texts}


def _default_of(value: Any) -> str | None:  # JSON: a text, or a list of named templates
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default")
    return value if isinstance(value, str) else None
