"""Between text and ids: prompts in, and written tokens out as text, in the order of the prompts."""

from collections.abc import Callable, Sequence

from megalith.config.sample import SampleConfig
from megalith.data.tokenizer import StreamDecoder, Tokenizer, ends_texts_itself
from megalith.errors import DataError
from megalith.infer.generate import Finish, GeneratedToken, generate
from megalith.infer.load import TextGenerator


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text to be written on: without an end token. An empty text begins a document.

    Raises:
        DataError: it holds what no text in Unicode does, or it is empty and the tokenizer has no
        token to begin with.
    """
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # the shell passes bytes that are not UTF-8 as halves of surrogate pairs
        raise DataError(
            f"character {error.start + 1} is {text[error.start]!r}: must be UTF-8 text."
        ) from error
    ids = tokenizer.encode(text)
    if ids and ends_texts_itself(tokenizer):
        ids = ids[:-1]
    if not ids:
        # Documents follow one another in training, so what comes after an end is a beginning.
        ids = [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    return ids


class Transcript:
    """The text of one sequence while it is written."""

    def __init__(self, prompt: str, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self.prompt, self.prompt_ids = prompt, list(prompt_ids)
        self.ids: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self._decoder = StreamDecoder(tokenizer)
        # Many tokenizers drop the space before the first word they decode; after the prompt there
        # is none to drop.
        self.echo = "".join(self._decoder.push(token) for token in prompt_ids)

    def add(self, written: GeneratedToken) -> None:
        """Take one token."""
        self.ids.append(written.token)
        self.finish = written.finish
        # The end token is no text.
        new = "" if written.finish == "stop" else self._decoder.push(written.token)
        if written.finish is not None:
            new += self._decoder.finish()
        self.text += new


class OrderedPrinter:
    """Texts of several sequences that grow at once, shown one after the other: the first unfinished
    one streams."""

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self._transcripts = transcripts
        self._current = -1
        self._shown = 0  # characters of the current one

    def unread_text(self) -> str:
        """What can be shown now: prompts and what follows them; with several, a line of its own
        before each."""
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
    """The ids of every prompt.

    Raises:
        DataError: one cannot be encoded; it is named.
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
    writer: TextGenerator,
    prompts: Sequence[str],
    sample: SampleConfig,
    *,
    ignore_eod: bool,
    show: Callable[[str], None],
) -> list[Transcript]:
    """Write on from every prompt; `show` gets the texts as they grow, in the order of the prompts.

    Every tensor-parallel rank calls this with the same arguments.

    Raises:
        ConfigError: the sampling settings break a rule.
        DataError: a prompt cannot be encoded or read.
        CheckpointError: the model's scores are not finite.
    """
    encoded = encode_prompts(prompts, writer.tokenizer)
    transcripts = [
        Transcript(text, ids, writer.tokenizer) for text, ids in zip(prompts, encoded, strict=True)
    ]
    stream = OrderedPrinter(transcripts)
    stops: frozenset[int] = frozenset() if ignore_eod else writer.stops
    for written in generate(writer.model, encoded, sample, stops=stops):
        transcripts[written.sequence].add(written)
        show(stream.unread_text())
    return transcripts
