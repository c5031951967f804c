"""Generation of texts from prompts: encoding, and the output in the order of the prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from megalith.config.generation import SamplingParams
from megalith.config.serve import EngineConfig
from megalith.data.tokenizer import StreamDecoder, Tokenizer, encode_prompt
from megalith.errors import CheckpointError, DataError
from megalith.infer.build import build_engine
from megalith.infer.load import TextGenerator
from megalith.infer.outputs import TokenOutput
from megalith.infer.stopping_criteria import FinishReason
from megalith.parallel.group import Group, gather_objects
from megalith.plan.keys import key


@dataclass(slots=True)
class Transcript:
    """Text of one sequence during generation."""

    prompt: str
    prompt_ids: list[int]
    echo: str
    """The prompt as the tokenizer decodes it."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None

    def add(self, output: TokenOutput) -> None:
        """Append a generated token."""
        if output.token is not None:
            self.ids.append(output.token)
        self.text += output.text
        self.finish = output.finish_reason


def open_transcript(prompt: str, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Transcript:
    """Return the transcript of a prompt before its first token."""
    decoder = StreamDecoder(tokenizer)
    echo = "".join(decoder.push(token) for token in prompt_ids)
    return Transcript(prompt, list(prompt_ids), echo)


class OrderedPrinter:
    """Prints texts of several sequences in order while they are generated: the first unfinished one
    streams."""

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self._transcripts = transcripts
        self._current = -1
        self._shown = 0  # characters of the current one

    def unread_text(self) -> str:
        """Return the text that can be printed now: prompts and continuations; several sequences
        have header lines."""
        parts = [self._next()] if self._current < 0 else []
        while self._current < len(self._transcripts):
            transcript = self._transcripts[self._current]
            parts.append((transcript.echo + transcript.text)[self._shown :])
            self._shown += len(parts[-1])
            if transcript.finish is None:
                break
            parts.append("\n" + self._next())
        return "".join(parts)

    def _next(self) -> str:
        self._current, self._shown = self._current + 1, 0
        count = len(self._transcripts)
        return f"--- {self._current + 1} of {count} ---\n" if self._current < count > 1 else ""


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of every prompt.

    Raises:
        DataError: a prompt cannot be encoded; it is named.
    """
    encoded = []
    for number, text in enumerate(texts, 1):
        try:
            encoded.append(encode_prompt(text, tokenizer))
        except DataError as error:
            raise DataError(
                f"prompt {number} ({text!r:.40}): {error} Use another prompt."
            ) from error
    return encoded


def generate_text(
    generator: TextGenerator,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    show: Callable[[str], None],
    config: EngineConfig | None = None,
    adapter: str | None = None,
) -> list[Transcript]:
    """Generate continuations of all prompts; `show` gets the texts as they grow, in the order of
    the prompts. Prompt i is sampled with a seed derived from `params.seed` and i. `adapter`: name
    of a LoRA adapter of `config`; None: the base model.

    Called by every rank with the same arguments. Data-parallel rank r generates from prompts r, r +
    dp, ...; the texts are shown at the end, and all ranks return all transcripts.

    Raises:
        ConfigError: the sampling parameters are invalid, or the memory does not suffice.
        DataError: a prompt cannot be encoded or processed.
        CheckpointError: the logits are not finite.
    """
    encoded = encode_prompts(prompts, generator.tokenizer)
    transcripts = [
        open_transcript(text, ids, generator.tokenizer)
        for text, ids in zip(prompts, encoded, strict=True)
    ]
    engine = build_engine(generator, config or EngineConfig())
    number_of: dict[int, int] = {}
    dp = generator.dp
    for index, ids in islice(enumerate(encoded), dp.rank, None, dp.size):
        seeded = params
        if params.seed is not None:
            seeded = replace(params, seed=key(params.seed, "prompt", str(index)))
        try:
            number_of[engine.add_request(ids, seeded, adapter=adapter)] = index
        except DataError as error:
            raise DataError(f"prompt {index + 1}: {error}") from error
    printer = OrderedPrinter(transcripts)
    while engine.has_unfinished:
        for output in engine.step():
            index = number_of[output.request_id]
            if output.finish_reason == "error":
                raise output.cause or CheckpointError(f"prompt {index + 1}: {output.error}")
            transcripts[index].add(output)
        if dp.size == 1:
            show(printer.unread_text())
    engine.runner.close()
    return transcripts if dp.size == 1 else gather_transcripts(transcripts, dp, show)


def gather_transcripts(
    transcripts: Sequence[Transcript], dp: Group, show: Callable[[str], None]
) -> list[Transcript]:
    """Return the transcripts of all data-parallel ranks, and show their texts. Collective."""
    gathered = gather_objects(list(transcripts), dp)
    complete: list[Transcript] = []
    for index in range(len(transcripts)):
        own = gathered[index % dp.size]
        assert isinstance(own, list)
        complete.append(own[index])
    show(OrderedPrinter(complete).unread_text())
    return complete
