"""A conversation with a model: the template writes what was said so far, the model the next
turn."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megalith.config.sample import SampleConfig
from megalith.data.chat_template import ChatTemplate, Message, find_template
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.infer.cache import PrefixState
from megalith.infer.generate import generate, remember
from megalith.infer.load import TextGenerator
from megalith.infer.text import Transcript
from megalith.models.companions import own_template, turn_ends
from megalith.models.pretrained import Pretrained


class StopFilter:
    """Text that is shown up to where a certain text begins; what may be the beginning of it is held
    back."""

    def __init__(self, end: str) -> None:
        self._end, self._held = end, ""
        self.found = False

    def push(self, text: str) -> str:
        """Take some text; return what can be shown now."""
        self._held += text
        place = self._held.find(self._end) if self._end else -1
        if place >= 0:
            self.found = True
        else:
            ends = range(min(len(self._end) - 1, len(self._held)), 0, -1)
            held = next((size for size in ends if self._end.startswith(self._held[-size:])), 0)
            place = len(self._held) - held
        shown, self._held = self._held[:place], self._held[place:]
        return shown

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        return "" if self.found else self._held


@dataclass(slots=True)
class Chat:
    """One conversation, which goes on turn by turn."""

    writer: TextGenerator
    template: ChatTemplate
    sample: SampleConfig
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    read: PrefixState = field(init=False)
    """What the model has read so far: a turn costs its own tokens only, as far as the template
    repeats the others."""

    def __post_init__(self) -> None:
        self.read = remember(self.writer.model.config)
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str, show: Callable[[str], None]) -> str:
        """Tell the model something and get its answer; `show` gets it piece by piece.

        Every tensor-parallel rank calls this with the same text. The conversation stays as it was
        if this fails; an answer that is interrupted ends there.

        Raises:
            DataError: the template refuses it, or the conversation is longer than the model reads.
            CheckpointError: the model's scores are not finite.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self.writer.tokenizer
        prompt = self.template.render(messages, prompt=True)
        ids, longest = tokenizer.encode_marked(prompt), self.writer.model.config.max_seq_len
        if len(ids) >= longest:
            raise DataError(
                f"the conversation has {len(ids)} tokens, and the model reads at most {longest} "
                "together with its "
                f"answer. Use /reset to begin again."
            )
        ends, end = turn_ends(self.template, tokenizer)
        transcript, until = Transcript(prompt, ids, tokenizer), StopFilter(end)
        answer: list[str] = []
        stream = generate(
            self.writer.model, [ids], self.sample, stops=self.writer.stops | ends, before=self.read
        )
        try:
            for written in stream:
                known = len(transcript.text)
                transcript.add(written)
                new = until.push(transcript.text[known:])
                new += until.finish() if written.finish is not None else ""
                answer.append(new)
                show(new)
                if until.found:
                    break
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        return "".join(answer)


def template_of(source: Pretrained, tokenizer: Tokenizer, wanted: str | None) -> ChatTemplate:
    """The template asked for, else the one the run was tuned with, else the tokenizer's own.

    Raises:
        DataError: there is none, or the model has no tokenizer at all.
    """
    if source.tokenizer.kind == "null":
        raise DataError(
            f"{source.path}: tokenizer.kind={source.tokenizer.kind}, so it reads numbers and no "
            "text. Use a model with "
            f"a tokenizer, or run `megalith generate`."
        )
    own = None if wanted else own_template(source, tokenizer)
    return own or find_template(wanted, tokenizer, source.tokenizer.path, setting="--template")
