"""When the output of a request ends: end tokens, stop strings and lengths; and its text as a
stream, up to a stop string."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalith.config.generation import MAX_STOP_STRINGS, SamplingParams
from megalith.data.tokenizer import StreamDecoder, Tokenizer
from megalith.errors import ConfigError

FinishReason = Literal["stop", "length", "context", "abort", "error", "tool_calls"]
"""Why an output ended: an end token or a stop string, max_new_tokens, the context length of the
model, its client, an error, or a call of a tool."""

CONTEXT_TOKENS = 16
"""Last prompt tokens that are decoded before the output, because tokenizers decode the first token
differently. Heuristic: longer than any character."""


class StopMatcher:
    """Finds a stop string in a text that is read character by character (Knuth, Morris and Pratt
    1977): `state` is the length of its longest proper prefix that ends the text."""

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string matches everywhere"
        self.stop = stop
        self.state = 0
        self._fallback = [0]  # of each prefix: its longest proper prefix that also ends it
        for char in stop[1:]:
            self._fallback.append(self._advance(self._fallback[-1], char))

    def push(self, char: str) -> bool:
        """Read a character; return whether a stop string ends with it. Another one may have begun
        in it."""
        self.state = self._advance(self.state, char)
        if self.state < len(self.stop):
            return False
        self.state = self._fallback[-1]
        return True

    def _advance(self, state: int, char: str) -> int:
        while state > 0 and self.stop[state] != char:
            state = self._fallback[state - 1]
        return state + 1 if self.stop[state] == char else state


class TextStream:
    """Text of one output, decoded token by token; ends at the first stop string.

    The stop string that is complete first ends the text, the longest of several, also across
    tokens. Withheld are only incomplete characters and the longest end of the text that may begin a
    stop string. The concatenated deltas are the final text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        visible_special_tokens: Collection[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """visible_special_tokens: those that are not skipped; prompt_ids: prompt before the output,
        which is not part of the text; the last few suffice."""
        self.stop_string: str | None = None
        """The stop string that ended the text."""

        self._decoder = StreamDecoder(tokenizer)
        self._specials = {
            token: text
            for text, token in tokenizer.specials.items()
            if not skip_special_tokens or text in visible_special_tokens
        }
        self._matchers = [StopMatcher(text) for text in dict.fromkeys(stop)]
        self._include_stop = include_stop
        self._withheld = ""
        self._parts: list[str] = []
        for token in prompt_ids[-CONTEXT_TOKENS:]:
            self._decoder.push(token)

    @property
    def text(self) -> str:
        """The deltas so far, concatenated."""
        return "".join(self._parts)

    def push(self, token: int, *, can_stop: bool = True) -> str:
        """Add a token; return the new text that is final.

        can_stop: whether a stop string that this token completes ends the text. After the end, the
        text does not change.
        """
        special = self._specials.get(token)
        if special is None:
            return self._append(self._decoder.push(token), can_stop)
        return self._append(self._decoder.finish() + special, can_stop)

    def finish(self, *, can_stop: bool = True) -> str:
        """Return the withheld text, at the end of the output; U+FFFD for an incomplete
        character."""
        delta = self._append(self._decoder.finish(), can_stop)
        if self.stop_string is None:
            delta += self._withheld
            self._parts.append(self._withheld)
            self._withheld = ""
        return delta

    def _append(self, text: str, can_stop: bool) -> str:
        """Add decoded text; return the part of the withheld and the new text that is final."""
        if self.stop_string is not None:
            return ""
        if not self._matchers:  # nothing is withheld
            self._parts.append(text)
            return text
        self._withheld += text
        end, self.stop_string = self._find_end(len(text), can_stop)
        delta = self._withheld[:end]
        self._withheld = self._withheld[end:] if self.stop_string is None else ""
        self._parts.append(delta)
        return delta

    def _find_end(self, num_new: int, can_stop: bool) -> tuple[int, str | None]:
        """Return the length of the final part of the withheld text, whose last `num_new` characters
        are new, and the stop string that ends it."""
        for index in range(len(self._withheld) - num_new, len(self._withheld)):
            char = self._withheld[index]
            matches = [matcher.stop for matcher in self._matchers if matcher.push(char)]
            if matches and can_stop:
                longest = max(matches, key=len)
                return index + 1 - (0 if self._include_stop else len(longest)), longest
        num_withheld = max((matcher.state for matcher in self._matchers), default=0)
        return len(self._withheld) - (0 if self._include_stop else num_withheld), None


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Result of the check after a token."""

    text: str
    """New text that is final."""

    finish: FinishReason | None = None
    """Set for the last token."""

    stop_reason: int | str | None = None
    """The end token or the stop string, if `finish` is stop."""


class StoppingCriteria:
    """Stopping criteria of one choice of a request, checked after each of its tokens.

    End tokens come first, then stop strings, then lengths: an end token that is the last allowed
    token ends with the reason stop. The text of an end token is part of the output only with
    `include_stop_str_in_output`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_ids: Iterable[int],
        prompt_ids: Sequence[int],
        max_total_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """eos_ids: end tokens of the model; max_total_tokens: context length of the model, prompt
        included; tokenizer: None for a model without text, whose requests have no stop strings."""
        assert tokenizer is not None or not params.stop, "stop strings need a tokenizer"
        self.end_ids: frozenset[int] = frozenset(params.stop_token_ids)
        """Tokens that end the output."""

        if not params.ignore_eos:
            self.end_ids |= frozenset(eos_ids)
        self.num_output = 0
        """Number of tokens so far."""

        self.stream = None
        if tokenizer is not None:
            self.stream = TextStream(
                tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                visible_special_tokens=params.visible_special_tokens,
                prompt_ids=prompt_ids,
            )
        self._params = params
        self._max_context_tokens = max_total_tokens - len(prompt_ids)

    def check(self, token: int, *, is_complete: bool = False) -> StopCheck:
        """Add a token of the output; return its text and whether the output ends.

        is_complete: whether nothing can follow the token in the structure of the output.
        """
        self.num_output += 1
        can_stop = self.num_output > self._params.min_tokens
        is_end = can_stop and token in self.end_ids
        text = ""
        if not is_end or self._params.include_stop_str_in_output:
            text = self._push(token, can_stop)
        finish: FinishReason | None = None
        reason: int | str | None = self._stop_string
        if reason is not None:
            finish = "stop"
        elif is_end:
            finish, reason = "stop", token
        elif is_complete:
            finish = "stop"
        elif self.num_output == self._params.max_new_tokens:
            finish = "length"
        elif self.num_output >= self._max_context_tokens:
            finish = "context"
        if finish is not None:
            text += self.flush()
            if self._stop_string is not None:  # completed by the withheld text
                finish, reason = "stop", self._stop_string
        return StopCheck(text, finish, reason)

    def flush(self) -> str:
        """Return the withheld text, at the end of the output: an aborted request calls it, `check`
        did it for the others."""
        can_stop = self.num_output > self._params.min_tokens
        return "" if self.stream is None else self.stream.finish(can_stop=can_stop)

    @property
    def _stop_string(self) -> str | None:
        return None if self.stream is None else self.stream.stop_string

    def _push(self, token: int, can_stop: bool) -> str:
        return "" if self.stream is None else self.stream.push(token, can_stop=can_stop)


def add_turn_end(
    params: SamplingParams, stop_ids: Iterable[int], stop_texts: Sequence[str]
) -> SamplingParams:
    """Return the parameters with the tokens and texts that end an assistant turn as stops; a
    structured output ends where it is complete, and may contain the texts.

    Raises:
        ConfigError: there are too many stop strings.
    """
    texts = () if params.structured_outputs else tuple(stop_texts)
    limit = MAX_STOP_STRINGS - len(texts)
    if texts and len(params.stop) > limit:
        raise ConfigError(
            f"stop has {len(params.stop)} texts, and the chat template adds {len(texts)}; the "
            f"limit is {MAX_STOP_STRINGS}. Use {limit} or less."
        )
    return replace(
        params,
        stop_token_ids=(*params.stop_token_ids, *sorted(stop_ids)),
        stop=(*params.stop, *texts),
    )
