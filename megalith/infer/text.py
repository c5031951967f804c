"""Text in and out of generation: encode prompts, and decode generated tokens in the order of the
prompts."""

from collections.abc import Callable, Sequence

from megalith.config.generation import SampleConfig
from megalith.data.tokenizer import StreamDecoder, Tokenizer, appends_eod
from megalith.errors import DataError
from megalith.infer.generate import Finish, GeneratedToken, generate
from megalith.infer.load import TextGenerator


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt, without an end token. An empty text begins a document.

    Raises:
        DataError: the text is not valid Unicode, or it is empty and the tokenizer has no token to
            begin with.
    """
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # the shell passes bytes that are not UTF-8 as lone surrogates
        raise DataError(
            f"character {error.start + 1} is {text[error.start]!r}: must be UTF-8 text."
        ) from error
    ids = tokenizer.encode(text)
    if ids and appends_eod(tokenizer):
        ids = ids[:-1]
    if not ids:
        # In training documents are concatenated, so a document begins after an end token.
        ids = [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    return ids


class Transcript:
    """Text of one sequence during generation."""

    def __init__(self, prompt: str, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self.prompt, self.prompt_ids = prompt, list(prompt_ids)
        self.ids: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self._decoder = StreamDecoder(tokenizer)
        # Many tokenizers drop the space before the first word they decode; decoding the prompt
        # first keeps it.
        self.echo = "".join(self._decoder.push(token) for token in prompt_ids)

    def add(self, generated: GeneratedToken) -> None:
        """Append a generated token."""
        self.ids.append(generated.token)
        self.finish = generated.finish
        # The end token is not part of the text.
        new = "" if generated.finish == "stop" else self._decoder.push(generated.token)
        if generated.finish is not None:
            new += self._decoder.finish()
        self.text += new


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
    sample: SampleConfig,
    *,
    ignore_eod: bool,
    show: Callable[[str], None],
) -> list[Transcript]:
    """Generate continuations of all prompts; `show` gets the texts as they grow, in the order of
    the prompts.

    Called by every tensor-parallel rank with the same arguments.

    Raises:
        ConfigError: the sampling settings are invalid.
        DataError: a prompt cannot be encoded or processed.
        CheckpointError: the logits are not finite.
    """
    encoded = encode_prompts(prompts, generator.tokenizer)
    transcripts = [
        Transcript(text, ids, generator.tokenizer)
        for text, ids in zip(prompts, encoded, strict=True)
    ]
    printer = OrderedPrinter(transcripts)
    stops: frozenset[int] = frozenset() if ignore_eod else generator.stops
    for token in generate(generator.model, encoded, sample, stops=stops):
        transcripts[token.sequence].add(token)
        show(printer.unread_text())
    return transcripts
