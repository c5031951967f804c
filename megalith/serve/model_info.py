"""What the HTTP process knows about the model: tokenizer, chat template and limits; without
torch."""

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalith.config.data import TokenizerConfig
from megalith.config.tree import from_dict
from megalith.data.chat_template import ChatTemplate, Message
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import DataError
from megalith.serve.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Description of a loaded model, sent by the engine process."""

    path: str
    tokenizer: dict[str, Any]
    """TokenizerConfig as plain data."""

    template: dict[str, Any] | None
    """name, source and specials of the chat template."""

    template_error: str
    """Why there is no template."""

    turn_end_ids: list[int]
    turn_end_texts: list[str]
    """What ends an assistant turn: token ids, or texts if the tokenizer has no token for them."""

    max_model_len: int
    max_prompt_characters: int | None
    """Longer prompts cannot fit the context; None: not known."""

    vocab_size: int
    hidden_size: int
    max_num_seqs: int
    generation_defaults: dict[str, Any]
    """Sampling parameters of the model's generation_config.json."""

    adapters: dict[str, str] = field(default_factory=dict)
    """Folders of the LoRA adapters that are loaded at the start, by name."""

    adapter_fingerprints: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 of the weights of the adapters, which separates their prefixes in the cache."""

    block_size: int | None = None
    """Tokens per block of the prefix cache; None: there is none."""


class RenderedPrompt(NamedTuple):
    """A conversation as the chat template writes it."""

    text: str
    token_ids: list[int]


@dataclass(slots=True)
class ServedModel:
    """A model under its name in requests."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of loading."""

    adapter_path: str | None = None
    """Folder of a LoRA adapter, which has the tokenizer and the template of its base; None: the
    base model."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    """A template renders in one thread at a time: its sandbox counts the work of a rendering."""

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter; None: the base model."""
        return None if self.adapter_path is None else self.name

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Any] = (),
    ) -> "RenderedPrompt":
        """Return the text and the token ids of a conversation; `tools`: their descriptions in the
        OpenAI API.

        Raises:
            ApiError: it is too long.
            DataError: there is no chat template, or it rejects the messages.
        """
        if self.template is None:
            raise DataError(
                f"the model has no chat template: {self.info.template_error} Restart the server "
                "with --template, or use /v1/completions."
            )
        with self._lock:
            text = self.template.render(
                messages, tools=tools or None, prompt=add_generation_prompt, variables=variables
            )
        self.check_length(text, "messages")
        return RenderedPrompt(text, self.tokenizer.encode_marked(text))

    def check_length(self, text: str, name: str) -> None:
        """Check before a text is tokenized that the context may hold it; `name`: its field.

        Raises:
            ApiError: it cannot.
        """
        limit = self.info.max_prompt_characters
        if limit is not None and len(text) > limit:
            raise ApiError(
                400,
                f"{name} has {len(text)} characters, but the context of the model is "
                f"{self.info.max_model_len} tokens, which have at most {limit} characters. Use a "
                "shorter one.",
                name.partition("[")[0],
                "context_length_exceeded",
            )


def build_served_model(name: str | None, info: ModelInfo) -> ServedModel:
    """Build the tokenizer and the template of a model; `name`: default, its folder's name."""
    template = None
    if info.template is not None:
        template = ChatTemplate(
            info.template["name"], info.template["source"], info.template["specials"]
        )
    tokenizer = build_tokenizer(from_dict(TokenizerConfig, info.tokenizer))
    return ServedModel(name or info.path.rstrip("/").rpartition("/")[2], info, tokenizer, template)


def freeze_objects() -> None:
    """Exclude the present objects, of modules and of the model, from later garbage collections,
    which otherwise interrupt all streams: a full one takes 40 ms in the HTTP process."""
    gc.collect()
    gc.freeze()
