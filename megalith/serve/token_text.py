"""Texts and bytes of single tokens, for log-probs in responses."""

from collections.abc import Sequence
from typing import Any

from megalith.data.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer
from megalith.serve.protocol import Logprobs
from megalith.serve.sse import finite_logprob

REPLACEMENT = "\ufffd"


class TokenTexts:
    """Texts of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = {token: text for text, token in tokenizer.specials.items()}
        # A token after another one: decoders remove the space before the first token of a text.
        self._context = tokenizer.encode("0")[:1]
        self._num_context = len(tokenizer.decode(self._context))
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the text of a token. A token that is part of a character has the text
        bytes:\\xNN, or token_id:N if its bytes are not known, so that texts are distinct."""
        if token not in self._texts:
            self._texts[token] = self._find_text(token)
        return self._texts[token]

    def token_bytes(self, token: int) -> list[int] | None:
        """Return the UTF-8 bytes of a token; None if they are not known."""
        if isinstance(self._tokenizer, ByteTokenizer) and token < 256:
            return [token]
        text = self._decode(token)
        return None if REPLACEMENT in text else list(text.encode())

    def _find_text(self, token: int) -> str:
        text = self._decode(token)
        if REPLACEMENT not in text:
            return text
        known = self.token_bytes(token)
        if known is None:
            return f"token_id:{token}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def _decode(self, token: int) -> str:
        special = self._specials.get(token)
        if special is not None:
            return special
        return self._tokenizer.decode([*self._context, token])[self._num_context :]


class CompletionLogprobs:
    """Log-probs of one choice in the format of /v1/completions: arrays of equal length."""

    def __init__(self, texts: TokenTexts, tokenizer: Tokenizer, *, offset: int = 0) -> None:
        """`offset`: characters of the choice's text before the first token."""
        self._texts, self._offset = texts, offset
        self._decoder = StreamDecoder(tokenizer)

    def add(self, positions: Sequence[Logprobs | int]) -> dict[str, Any]:
        """Return the arrays of more positions; a token without log-probs (the first of a prompt)
        is an int."""
        arrays: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for position in positions:
            has_logprobs = isinstance(position, Logprobs)
            token = position.token if isinstance(position, Logprobs) else position
            arrays["tokens"].append(self._texts.text(token))
            arrays["text_offset"].append(self._offset)
            self._offset += len(self._decoder.push(token))
            arrays["token_logprobs"].append(
                finite_logprob(position.logprob) if isinstance(position, Logprobs) else None
            )
            arrays["top_logprobs"].append(
                self._top(position) if isinstance(position, Logprobs) else None
            )
            assert has_logprobs or len(arrays["tokens"]) == 1
        return arrays

    def _top(self, position: Logprobs) -> dict[str, float]:
        """Return log-probs by text; of equal texts the larger one."""
        top: dict[str, float] = {}
        for token, value in position.top:
            text = self._texts.text(token)
            top[text] = max(finite_logprob(value), top.get(text, -float("inf")))
        return top


def chat_logprobs(
    texts: TokenTexts, positions: Sequence[Logprobs], *, num_top: int
) -> list[dict[str, Any]]:
    """Return log-probs in the format of /v1/chat/completions, with the `num_top` most likely tokens
    at each position."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": finite_logprob(logprob),
            "bytes": texts.token_bytes(token),
        }

    return [
        {
            **entry(position.token, position.logprob),
            "top_logprobs": [entry(token, value) for token, value in position.top[:num_top]],
        }
        for position in positions
    ]
