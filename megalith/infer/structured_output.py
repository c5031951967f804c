"""Structured output: compiled grammars of requests, and the tokens that they allow at each step.

The only module that imports llguidance, which matches JSON schemas, regular expressions and context
free grammars byte by byte against the tokens of a vocabulary. A request has a `Grammar`, which is
compiled once and cached; each of its choices has a `GrammarState`.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.config.generation import StructuredOutputsParams
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError

MAX_CACHED_GRAMMARS = 64
"""Compiled grammars that an engine keeps (heuristic: a service has a few schemas)."""

MAX_LOCATED_SCHEMAS = 64
"""Schemas inside an invalid one that are compiled to locate its error (heuristic)."""

JSON_OPTIONS = {"whitespace_pattern": r"(?: |\n[ \t]{0,32})", "lenient": False}
"""Between tokens of JSON there may be a space, or a newline with indentation: not more, because
models that may write whitespace repeat it endlessly. Unsupported keywords of a schema are
errors."""

SCHEMA_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON schemas whose values are schemas by name."""


class GrammarError(Exception):
    """A grammar that failed while it was matched; only its own request ends."""


class GrammarState:
    """Position of one choice of a request in its grammar; draft tokens are tried on a copy."""

    def __init__(self, grammar: "Grammar", matcher: Any, end_ids: frozenset[int]) -> None:
        self._grammar, self._end_ids = grammar, end_ids
        self._matcher = matcher  # an LLMatcher

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def allowed_tokens(self) -> NDArray[np.bool_]:
        """Return which tokens may follow: bool [v]. End tokens may where the text is complete.

        Raises:
            GrammarError: the grammar is too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.zeros(self._grammar.vocab_size, np.bool_)
        num_tokens = self._grammar.num_tokens
        allowed[:num_tokens] = np.unpackbits(bits, count=num_tokens, bitorder="little")
        allowed[list(self._end_ids)] = self._matcher.is_accepting()
        return allowed

    def accept(self, token: int) -> None:
        """Add a token to the text; end tokens are not part of it.

        Raises:
            GrammarError: it does not follow the grammar, or the grammar is too complex.
        """
        if token not in self._end_ids:
            self._matcher.consume_token(token)
            self._check()

    def is_end(self, token: int) -> bool:
        """Whether a token ends the output."""
        return token in self._end_ids

    def copy(self) -> "GrammarState":
        """Return an independent copy."""
        return GrammarState(self._grammar, self._matcher.deep_copy(), self._end_ids)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"structured_outputs cannot be matched ({_reason(self._matcher.get_error())}). Use "
                "a simpler schema or grammar."
            )


def compute_masks(state: GrammarState, draft_ids: Sequence[int]) -> NDArray[np.bool_]:
    """Return which tokens may follow the text, and the text with each draft: bool [drafts + 1, v].

    The masks after a draft that the grammar forbids, or that ends the text, repeat the last one:
    verification stops there. The state is unchanged.

    Raises:
        GrammarError: the grammar is too complex.
    """
    trial = state.copy() if draft_ids else state
    masks = [trial.allowed_tokens()]
    for draft in draft_ids:
        if not masks[-1][draft] or trial.is_end(draft):
            break
        trial.accept(draft)
        if trial.is_finished:
            break
        masks.append(trial.allowed_tokens())
    masks += [masks[-1]] * (len(draft_ids) + 1 - len(masks))
    return np.stack(masks)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar for the tokens of one tokenizer."""

    matcher: Any  # the LLMatcher at the start of the text
    num_tokens: int
    """Number of token ids of the tokenizer."""

    vocab_size: int
    """Number of token ids of the model, which may be larger."""

    def start(self, end_ids: frozenset[int]) -> GrammarState:
        """Return the state before the first token; `end_ids`: tokens that end the output."""
        return GrammarState(self, self.matcher.deep_copy(), end_ids)


class GrammarCompiler:
    """Compiles the grammars of requests for one tokenizer, and caches them.

    Compilation takes up to a second, so callers do it on a thread of their own before the engine
    needs the grammar; several threads may call it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._grammars: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # the LLTokenizer
        self._vocabulary_lock = threading.Lock()

    def prepare(self) -> None:
        """Build what all grammars share, so that no step waits for it; if that is not possible, a
        request with a structure is rejected."""
        with suppress(ConfigError, DataError):
            self._build_vocabulary(_import_library())

    def _build_vocabulary(self, library: Any) -> Any:  # the LLTokenizer
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = library.LLTokenizer(_Vocabulary(self._tokenizer))
            return self._vocabulary

    def is_cached(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` returns at once."""
        return params in self._grammars

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of valid parameters.

        Raises:
            ConfigError: llguidance is not installed, or the structure is not valid or has no text.
            DataError: the bytes of the tokens are not known.
        """
        with self._lock:
            if params in self._grammars:
                self._grammars.move_to_end(params)
                return self._grammars[params]
        library = _import_library()
        matcher = _compile(library, self._build_vocabulary(library), params)
        grammar = Grammar(matcher, self._tokenizer.vocab_size, self._vocab_size)
        with self._lock:
            self._grammars[params] = grammar
            if len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


def _import_library() -> Any:  # the module llguidance
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            f"structured_outputs needs llguidance ({error}). Install it with: "
            'pip install "megalith[structured]".'
        ) from None
    return llguidance


class _Vocabulary:
    """Tokens of a tokenizer as llguidance's interface of a tokenizer.

    Its end token is one more than the vocabulary has: end tokens of the model are never part of the
    text, and `GrammarState` decides where they are allowed.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = {token: text for text, token in tokenizer.specials.items()}
        known = self._texts = tokenizer.token_bytes()
        self.eos_token_id = len(known)
        self.tokens = [
            names.get(token, f"<unused-{token}>").encode() if text is None else text
            for token, text in enumerate([*known, None])
        ]
        self.special_token_ids = [
            token for token, text in enumerate([*known, None]) if text is None
        ]
        self._ids = {text: token for token, text in enumerate(known) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return ids with exactly the bytes of a text, those of the tokenizer if possible: some
        tokenizers add a space."""
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode_marked(data.decode(errors="replace"))
        # special tokens are no text: a grammar refers to them by their ids
        if b"".join(self._texts[token] or b"" for token in ids) == data:
            return ids
        return self._encode_greedily(data)

    def _encode_greedily(self, data: bytes) -> list[int]:
        """Return the longest token at each position; ends at bytes without a token."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            sizes = range(min(self._longest, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[data[start : start + size]])
            start += size
        return ids


# --- compilation


def _compile(library: Any, vocabulary: Any, params: StructuredOutputsParams) -> Any:
    """Return the matcher of a structure at the start of the text.

    Raises:
        ConfigError: the structure is not valid, or has no text.
    """
    (kind,) = params.kinds
    name = f"structured_outputs.{kind}"
    try:
        structure = _structure_grammar(library, params)
        matcher = _build_matcher(library, vocabulary, [structure])
    except ValueError as problem:
        raise ConfigError(f"{name} is not valid: {_reason(str(problem))}. Correct it.") from None
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        where = ""
        if params.json is not None:
            path = _locate(library, vocabulary, json.loads(params.json), matcher.get_error())
            where = f" at #{path}" if path else ""
        raise ConfigError(f"{name} is not valid{where}: {reason}. Correct it.")
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        error = matcher.get_error()
        if not error or error.startswith("NoExtension"):
            raise ConfigError(f"{name} matches no text, so there is no output. Correct it.")
        raise ConfigError(f"{name} is too complex ({_reason(error)}). Use a simpler one.")
    if params.outer_grammar is None:
        return matcher
    outer = {"lark_grammar": params.outer_grammar}
    matcher = _build_matcher(library, vocabulary, [outer, structure | {"name": "structure"}])
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        raise ConfigError(f"structured_outputs.outer_grammar is not valid: {reason}. Correct it.")
    return matcher


def _build_matcher(library: Any, vocabulary: Any, grammars: Sequence[dict[str, Any]]) -> Any:
    """Return a matcher of the first grammar, which may refer to the others by name."""
    return library.LLMatcher(vocabulary, json.dumps({"grammars": grammars}), log_level=0)


def _structure_grammar(library: Any, params: StructuredOutputsParams) -> dict[str, Any]:
    """Return the structure in llguidance's JSON format of grammars."""
    if params.grammar is not None:
        return {"lark_grammar": params.grammar}
    if params.choice:
        return {"lark_grammar": f"start: {' | '.join(map(json.dumps, params.choice))}"}
    if params.regex is not None:
        text = library.LLMatcher.grammar_from_regex(params.regex)
    else:
        schema = '{"type": "object"}' if params.json is None else params.json
        text = library.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    grammar: dict[str, Any] = json.loads(text)["grammars"][0]
    return grammar


def _locate(library: Any, vocabulary: Any, schema: dict[str, Any], error: str) -> str:
    """Return the path (JSON pointer) of the innermost schema that has an error by itself; empty if
    that takes more than MAX_LOCATED_SCHEMAS compilations."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path, num_compiled = "", 0
    while True:
        for inner_path, inner in _iter_schemas(schema):
            num_compiled += 1
            if num_compiled > MAX_LOCATED_SCHEMAS:
                return ""
            params = StructuredOutputsParams(json=json.dumps(definitions | inner))
            grammar = _structure_grammar(library, params)
            if _build_matcher(library, vocabulary, [grammar]).get_error() == error:
                path, schema = path + inner_path, inner
                break
        else:
            return path


def _iter_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly inside a schema with their paths."""
    for keyword, value in schema.items():
        items: list[tuple[str, Any]] = [(f"/{keyword}", value)]
        if isinstance(value, list):
            items = [(f"/{keyword}/{index}", item) for index, item in enumerate(value)]
        elif keyword in SCHEMA_MAPPINGS and isinstance(value, dict):
            items = [(f"/{keyword}/{name}", item) for name, item in value.items()]
        yield from ((path, item) for path, item in items if isinstance(item, dict))


def _reason(error: str) -> str:
    """Return the line of an error that states the reason, without its context."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    stated = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (stated or lines or ["unknown error"])[0].rstrip(".")[:300]
