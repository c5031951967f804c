"""Chat with a model: the template renders the conversation, the model generates the next turn."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megalith.config.generation import SampleConfig
from megalith.data.chat_template import ChatTemplate, Message, find_template
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.hf.convert import find_own_template, find_turn_end
from megalith.hf.pretrained import Pretrained
from megalith.infer.cache import PrefixState
from megalith.infer.generate import Transcript, build_prefix_state, generate
from megalith.infer.load import TextGenerator


class StopFilter:
    """Streams text up to a stop text; a possible beginning of it is held back."""

    def __init__(self, end: str) -> None:
        self._end, self._held = end, ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; returns what can be shown now."""
        self._held += text
        end = self._held.find(self._end) if self._end else -1
        if end >= 0:
            self.found = True
        else:
            ends = range(min(len(self._end) - 1, len(self._held)), 0, -1)
            held = next((size for size in ends if self._end.startswith(self._held[-size:])), 0)
            end = len(self._held) - held
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        return "" if self.found else self._held


@dataclass(slots=True)
class Chat:
    """A conversation with a model, turn by turn."""

    generator: TextGenerator
    template: ChatTemplate
    sample: SampleConfig
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    read: PrefixState = field(init=False)
    """KV cache of the conversation: a turn costs only its own tokens if the template repeats the
    previous ones."""

    def __post_init__(self) -> None:
        self.read = build_prefix_state(self.generator.model.config)
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def reply(self, text: str, show: Callable[[str], None]) -> str:
        """Send a user message and return the answer; `show` gets it piece by piece.

        Called by every tensor-parallel rank with the same text. If it fails, the conversation is
        unchanged; an interrupted answer ends there.

        Raises:
            DataError: the template rejects the messages, or they are longer than the context of the
                model.
            CheckpointError: the logits are not finite.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self.generator.tokenizer
        prompt = self.template.render(messages, prompt=True)
        ids, longest = tokenizer.encode_marked(prompt), self.generator.model.config.max_seq_len
        if len(ids) >= longest:
            raise DataError(
                f"the conversation has {len(ids)} tokens, but the context of the model is "
                f"{longest} tokens including the answer. Use /reset to start again."
            )
        stop_ids, stop_text = find_turn_end(self.template, tokenizer)
        transcript, stop_filter = Transcript(prompt, ids, tokenizer), StopFilter(stop_text)
        answer: list[str] = []
        stream = generate(
            self.generator.model,
            [ids],
            self.sample,
            stops=self.generator.stops | stop_ids,
            before=self.read,
        )
        try:
            for token in stream:
                known = len(transcript.text)
                transcript.add(token)
                new = stop_filter.push(transcript.text[known:])
                new += stop_filter.finish() if token.finish is not None else ""
                answer.append(new)
                show(new)
                if stop_filter.found:
                    break
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        return "".join(answer)


def select_template(source: Pretrained, tokenizer: Tokenizer, name: str | None) -> ChatTemplate:
    """Return the template `name`, else the one of the run that tuned the model, else the
    tokenizer's.

    Raises:
        DataError: there is none, or the model has no tokenizer.
    """
    if source.tokenizer.kind == "null":
        raise DataError(
            f"{source.path}: tokenizer.kind={source.tokenizer.kind}, so it has no text. "
            "Use a model with a tokenizer, or run `megalith generate`."
        )
    own = None if name else find_own_template(source, tokenizer)
    return own or find_template(name, tokenizer, source.tokenizer.path, setting="--template")
