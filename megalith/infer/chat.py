"""Chat with a model: the template renders the conversation, the model generates the next turn."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megalith.config.generation import SamplingParams
from megalith.config.serve import EngineConfig
from megalith.data.chat_template import ChatTemplate, Message, find_template
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, DataError
from megalith.hf.convert import find_own_template, find_turn_end
from megalith.hf.pretrained import Pretrained
from megalith.infer.build import build_engine
from megalith.infer.engine import InferenceEngine
from megalith.infer.load import TextGenerator
from megalith.infer.outputs import TokenOutput
from megalith.infer.stopping_criteria import add_turn_end


@dataclass(slots=True)
class Chat:
    """A conversation with a model, turn by turn. The prefix cache makes a turn cost only its own
    tokens if the template repeats the previous ones."""

    generator: TextGenerator
    template: ChatTemplate
    params: SamplingParams
    config: EngineConfig
    system: str | None = None
    adapter: str | None = None
    """Name of a loaded LoRA adapter; None: the base model."""

    messages: list[Message] = field(default_factory=list)
    engine: InferenceEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = build_engine(self.generator, self.config)
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
        ids = self.generator.tokenizer.encode_marked(self.template.render(messages, prompt=True))
        longest = self.engine.max_model_len
        if len(ids) >= longest:
            raise DataError(
                f"the conversation has {len(ids)} tokens, but the context of the model is "
                f"{longest} tokens including the answer. Use /reset to start again."
            )
        number = self.engine.add_request(
            ids,
            add_turn_end(self.params, *find_turn_end(self.template, self.generator.tokenizer)),
            adapter=self.adapter,
        )
        answer: list[str] = []
        try:
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    self._show(output, answer, show)
        except KeyboardInterrupt:  # the conversation has what was shown
            self.engine.abort(number)
            self._append(messages, answer)
            raise
        except BaseException:
            self.engine.abort(number)
            raise
        return self._append(messages, answer)

    def _append(self, messages: list[Message], answer: list[str]) -> str:
        """Add an answer to the conversation, unless it is empty; returns it."""
        text = "".join(answer)
        if text:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        return text

    def _show(self, output: TokenOutput, answer: list[str], show: Callable[[str], None]) -> None:
        if output.finish_reason == "error":
            raise output.cause or CheckpointError(f"the answer ended: {output.error}")
        answer.append(output.text)
        show(output.text)


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
