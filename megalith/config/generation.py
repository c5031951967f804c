"""Sampling settings of text generation: `SamplingParams` of a request and their limits."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from megalith.config.fields import (
    MAX_NUMBER,
    Example,
    Ge,
    Gt,
    Hint,
    Le,
    field_ranges,
    field_types,
    range_problems,
    type_origin,
    union_options,
)
from megalith.errors import ConfigError, did_you_mean
from megalith.storage import parse_json

LogprobsMode = Literal["raw", "processed"]
"""raw: log-softmax of the model's logits; processed: after all processors, the temperature and the
filters, -inf for removed tokens."""

# Limits of a request: every parameter that multiplies work has one, because a missing limit lets
# one request stop a server. The numbers are those of the OpenAI API or common in servers.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STRING_CHARACTERS = 256
MAX_BIASED_TOKENS = 1024
MAX_BANNED_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_COUNT = 2**31 - 1  # so that it can be sent to another process
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_NESTING = 64
MAX_REGEX_BYTES = 4 * 1024
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_STRUCTURE_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Structure that the text of a request must have: exactly one of the first five fields is set.

    The output ends where the structure is complete, and only there, unless a length or a stop
    string of the request truncates it.
    """

    json: str | None = None
    """JSON schema as JSON text (in requests also an object)."""

    json_object: bool = False
    """Any JSON object."""

    regex: str | None = None
    """Regular expression that matches the entire output, in the syntax of Rust's regex crate."""

    choice: tuple[str, ...] = ()
    """Texts, one of which is the output."""

    grammar: str | None = None
    """Grammar in Lark syntax, whose rule `start` is the output."""

    outer_grammar: str | None = None
    """Grammar in Lark syntax of the entire output, in which @structure stands for the structure,
    such as reasoning before it. Unset: the output is the structure."""

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that define a structure."""
        names = ("json", "json_object", "regex", "choice", "grammar")
        return [name for name in names if getattr(self, name) not in (None, False, ())]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set as plain JSON data."""
        values = {name: getattr(self, name) for name in (*self.kinds, "outer_grammar")}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Generation settings of one request.

    Logits are processed in this order: logit_bias; allowed_token_ids, bad_words and a grammar;
    repetition_penalty; frequency_penalty and presence_penalty; min_tokens; temperature; top_k;
    top_p; min_p. `sampling_problems` checks the values; the constructor does not.
    """

    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] = 1
    """Number of choices (completions) of the prompt; each has its own random numbers."""

    max_new_tokens: Annotated[int | None, Ge(0)] = None
    """Maximum number of tokens to generate. 0: only compute the log-probs of the prompt. Unset: up
    to the context length of the model."""

    min_tokens: Annotated[int, Ge(0), Le(MAX_COUNT)] = 0
    """Number of tokens before which no end token can be sampled and no stop string matches."""

    temperature: Annotated[float, Ge(0), Example(1.0)] = 1.0
    """Logits are divided by the temperature; 0 is greedy decoding."""

    top_k: Annotated[int | None, Ge(-1), Le(MAX_COUNT), Example(50)] = None
    """Sample from the k most likely tokens, including ties with the last of them. Unset, 0 or -1:
    all tokens; 1 is greedy decoding; values above the vocabulary size are all tokens."""

    top_p: Annotated[float | None, Ge(0), Le(1), Example(0.9)] = None
    """Sample from the smallest set of most likely tokens whose total probability is at least top_p
    (Holtzman et al. 2019, arXiv:1904.09751), after top_k. Unset, 0 or 1: all tokens."""

    min_p: Annotated[float, Ge(0), Le(1), Example(0.05)] = 0.0
    """Remove tokens that are less likely than min_p times the most likely one (Nguyen et al. 2024,
    arXiv:2407.01082). 0: all tokens."""

    repetition_penalty: Annotated[float, Gt(0), Example(1.0)] = 1.0
    """Divide positive logits of tokens in the prompt and the output by this number, and multiply
    negative ones by it (Keskar et al. 2019, arXiv:1909.05858, section 4.1). 1: no penalty."""

    presence_penalty: Annotated[float, Ge(-2), Le(2), Example(0.0)] = 0.0
    """Subtracted from the logits of tokens that occur in the output."""

    frequency_penalty: Annotated[float, Ge(-2), Le(2), Example(0.0)] = 0.0
    """Subtracted from the logit of a token once per occurrence in the output."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, bias): added to the logits, -100 to 100."""

    allowed_token_ids: tuple[int, ...] | None = None
    """Token ids that can be sampled. Unset: all."""

    bad_words: tuple[str, ...] = ()
    """Texts whose token sequences are not generated: the last token of a sequence is masked where
    the tokens before it match."""

    stop: tuple[str, ...] = ()
    """Stop strings: the output ends where one of them is complete in its text."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, in addition to the end tokens (EOS) of the model."""

    ignore_eos: bool = False
    """Continue after the end tokens of the model."""

    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the token that ended the output, in the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    visible_special_tokens: tuple[str, ...] = ()
    """Special tokens that stay in the text although skip_special_tokens is true: markers that are
    parsed afterwards."""

    seed: int | None = None
    """Random seed, a signed 64-bit integer: the same seed and prompt give the same output in any
    batch. Unset: derived from the seed of the engine and the request."""

    logprobs: Annotated[int | None, Ge(0), Le(MAX_TOP_LOGPROBS)] = None
    """Return the log-prob of each generated token, and of this number of most likely tokens."""

    prompt_logprobs: Annotated[int | None, Ge(0), Le(MAX_TOP_LOGPROBS)] = None
    """Return the log-prob of each prompt token after the first, and of this number of most likely
    tokens."""

    logprobs_mode: LogprobsMode = "raw"
    """Whether the log-probs of generated tokens are those of the model or of the distribution that
    was sampled from."""

    priority: int = 0
    """Scheduling priority; requests with a lower number run first."""

    deadline_s: Annotated[float | None, Gt(0), Example(60.0)] = None
    """Abort the request this many seconds after its arrival. Unset: never."""

    structured_outputs: StructuredOutputsParams | None = None
    """Structure of the text, such as a JSON schema. Unset: any text."""

    cache_salt: str | None = None
    """Share cached prefixes only with requests of the same salt. Unset: with all others without
    one."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SamplingParams":
        """Build the parameters from plain JSON data; values are not checked.

        Lists become tuples, one stop string a tuple, and the mapping of logit_bias, whose keys
        may be decimal text, pairs.

        Raises:
            ConfigError: a name is unknown; all unknown names are listed.
        """
        known = {field.name for field in fields(cls)}
        problems = [unknown_field_problem(name) for name in data if name not in known]
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(**{name: _from_json(name, value) for name, value in data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults as plain JSON data, the argument
        of `from_dict`."""
        defaults = {name: item.default for name, item in field_ranges(SamplingParams).items()}
        values = {name: getattr(self, name) for name in defaults}
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        return {name: _to_json(name, value) for name, value in changed.items()}

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen without random numbers."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far, so that their counts are needed."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def active_top_k(self) -> int | None:
        """top_k, or None if it is off."""
        return None if self.top_k in (None, 0, -1) else self.top_k

    @property
    def active_top_p(self) -> float | None:
        """top_p, or None if it is off."""
        return None if self.top_p in (None, 0, 1) else self.top_p


MIN_TEMPERATURE = 1e-9
"""Lower temperatures are greedy decoding, and would overflow fp32: at this one, logits that differ
by 1e-7 are a factor e^100 apart, and the noise of two tokens differs by less than 41."""


def _to_json(name: str, value: Any) -> Any:  # the value of any field, as plain data
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    if isinstance(value, StructuredOutputsParams):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _from_json(name: str, value: Any) -> Any:  # parsed JSON of any shape, checked later
    if name == "structured_outputs" and isinstance(value, Mapping):
        return _read_structure(value)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple((_token_id(token), bias) for token, bias in value.items())
    if name == "logit_bias" and isinstance(value, list):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    if name in ("stop", "bad_words") and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _read_structure(data: Mapping[str, Any]) -> StructuredOutputsParams:
    """Build the structure of JSON data; a schema becomes text, and values are not checked.

    Raises:
        ConfigError: a name is unknown.
    """
    known = [field.name for field in fields(StructuredOutputsParams)]
    unknown = [name for name in data if name not in known]
    if unknown:
        advice = did_you_mean(unknown[0], known) or f" Use one of {', '.join(known)}."
        raise ConfigError(
            f"structured_outputs.{_shorten(unknown[0])}: there is no such field.{advice}"
        )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) and name == "choice" else value
        for name, value in data.items()
        if not (value is None or (name == "json_object" and value is False))
    }
    if "json" in values and not isinstance(values["json"], str):
        values["json"] = json.dumps(values["json"])
    return StructuredOutputsParams(**values)


def _token_id(key: object) -> object:
    """Return the token id of a JSON key; other keys are unchanged and rejected later."""
    return int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key) else key


# --- checks of the values


def unknown_field_problem(name: str) -> str:
    """Return the message about a name that is no sampling parameter, with the nearest one.

    >>> unknown_field_problem("temprature")
    'temprature: there is no such sampling parameter. Did you mean temperature?'
    """
    names = [field.name for field in fields(SamplingParams)]
    advice = did_you_mean(name, names) or f" Use one of {', '.join(names)}."
    return f"{_shorten(name)}: there is no such sampling parameter.{advice}"


def sampling_problems(params: SamplingParams, *, vocab_size: int | None) -> list[str]:
    """Return a message for every value that is not valid: field, value, reason, a value that works.

    vocab_size: number of token ids of the model; None: ids are not compared with it.
    """
    # servers check every request, most of which set few fields; defaults are valid
    changed = [
        name
        for name, item in field_ranges(SamplingParams).items()
        if getattr(params, name) is not item.default
    ]
    wrong_types = _type_problems(params, changed)
    checked = [name for name in changed if name not in wrong_types]
    # the checks of single fields cover token ids
    numbers = [name for name in checked if name not in _TOKEN_ID_FIELDS]
    problems = [*wrong_types.values(), *range_problems(params, names=numbers)]
    for name, check in _CHECKS.items():
        if name in checked:
            problems += check(params)
    for name in _TOKEN_ID_FIELDS:
        if name in checked:
            problems += _token_id_problems(params, name, vocab_size)
    if not {"min_tokens", "max_new_tokens"} & wrong_types.keys():
        problems += _min_tokens_problems(params)
    return problems


_TOKEN_ID_FIELDS = ("logit_bias", "allowed_token_ids", "stop_token_ids")

_TYPE_WORDS: Mapping[Hint, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    tuple[str, ...]: "a list of strings",
    tuple[int, ...]: "a list of token ids",
    tuple[tuple[int, float], ...]: "a mapping from token ids to numbers",
    StructuredOutputsParams: "an object with json, json_object, regex, choice or grammar",
}
"""What a value of a type has to be, in messages."""

_EXAMPLES: Mapping[str, str] = {
    "max_new_tokens": "256",
    "top_k": "50",
    "top_p": "0.9",
    "logit_bias": '{"42": -100}',
    "allowed_token_ids": "[42]",
    "bad_words": '["text"]',
    "stop": '["text"]',
    "stop_token_ids": "[42]",
    "ignore_eos": "false",
    "include_stop_str_in_output": "false",
    "skip_special_tokens": "true",
    "visible_special_tokens": '["</think>"]',
    "seed": "1234",
    "logprobs": "5",
    "prompt_logprobs": "5",
    "deadline_s": "60",
    "cache_salt": "text",
    "structured_outputs": '{"choice": ["yes", "no"]}',
}
"""Values that messages about types recommend; the default of the other fields."""


def _type_problems(params: SamplingParams, names: Iterable[str]) -> dict[str, str]:
    """Return the message about every field of `names` whose value has another type, by name."""
    problems = {}
    for name in names:
        value, hint = getattr(params, name), field_types(SamplingParams)[name]
        if not _matches(value, hint):
            option = union_options(hint)[0]
            words = (
                " or ".join(get_args(option))
                if type_origin(option) is Literal
                else _TYPE_WORDS[option]
            )
            example = _EXAMPLES.get(name, field_ranges(SamplingParams)[name].default)
            problems[name] = f"{name}={_shorten(value)} must be {words}. Use {example}."
    return problems


def _matches(value: object, hint: Hint) -> bool:
    """Return whether a value has the annotated type: a boolean is no number, and a float may be an
    integer that is not too large for one."""
    options, items = union_options(hint), get_args(hint)
    if len(options) > 1:
        return any(_matches(value, option) for option in options)
    if type_origin(hint) is Literal:
        return value in items
    if type_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis and items[0] in (int, str):  # a fast check of long lists
            return {type(item) for item in value} <= {items[0]}
        types = [items[0]] * len(value) if items[-1] is Ellipsis else items
        return len(value) == len(types) and all(map(_matches, value, types))
    if isinstance(value, bool):
        return hint is bool
    if hint is float and isinstance(value, int):
        return abs(value) <= MAX_NUMBER
    return isinstance(value, hint)


def _shorten(value: object) -> str:
    """Return the first characters of a value as text for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_texts(name: str, texts: Sequence[str], limit: int) -> Iterator[str]:
    """Yield the messages about a list of texts: their number, the first empty, the first invalid
    and the first long one."""
    if len(texts) > limit:
        yield f"{name} has {len(texts)} texts, but the limit is {limit}. Pass {limit} or less."
    if "" in texts:
        yield (
            f"{name}[{texts.index('')}] is an empty text, which is part of every text. Remove it."
        )
    for index, text in enumerate(texts[:limit]):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            yield (
                f"{name}[{index}] has the unpaired surrogate U+{ord(text[error.start]):04X}, which "
                "is no character, so no output contains it. Remove it."
            )
            break
    sizes = [len(text) for text in texts]
    if max(sizes, default=0) > MAX_STRING_CHARACTERS:
        index = next(i for i, size in enumerate(sizes) if size > MAX_STRING_CHARACTERS)
        yield (
            f"{name}[{index}]={_shorten(texts[index])} has {sizes[index]} characters, but the "
            f"limit is {MAX_STRING_CHARACTERS}. Use a shorter text."
        )


def _check_seed(params: SamplingParams) -> Iterator[str]:
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        yield f"seed={_shorten(params.seed)} must be a signed 64-bit integer. Use 1234."


def _check_cache_salt(params: SamplingParams) -> Iterator[str]:
    salt = params.cache_salt
    if salt == "":
        yield "cache_salt is an empty text, which separates nothing. Leave it unset."
    elif salt is not None and len(salt) > MAX_STRING_CHARACTERS:
        yield (
            f"cache_salt={_shorten(salt)} has {len(salt)} characters, but the limit is "
            f"{MAX_STRING_CHARACTERS}. Use a shorter text."
        )


def _check_logit_bias(params: SamplingParams) -> Iterator[str]:
    for token, bias in params.logit_bias:
        if not abs(bias) <= MAX_LOGIT_BIAS:
            yield (
                f"logit_bias[{_shorten(token)}]={bias} must be a finite number from "
                f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}. "
                f"Use -{MAX_LOGIT_BIAS:g} to ban a token."
            )
            return
    counts = Counter(token for token, _ in params.logit_bias)
    token, count = max(counts.items(), key=lambda item: item[1], default=(0, 1))
    if count > 1:
        yield f"logit_bias has the token id {token} {count} times. Pass each id once."


def _check_structure(params: SamplingParams) -> Iterator[str]:
    structure, name = params.structured_outputs, "structured_outputs"
    if structure is None:
        return
    kinds = structure.kinds
    if len(kinds) != 1:
        given = " and ".join(kinds) or "none"
        yield (
            f"{name} must have exactly one of json, json_object, regex, choice and grammar, but "
            f"has {given}. Use one."
        )
        return
    wrong = _structure_type_problem(structure)
    if wrong is not None:
        yield f"{name}.{wrong}"
        return
    if structure.outer_grammar is not None:
        yield from _check_outer_grammar(f"{name}.outer_grammar", structure.outer_grammar)
    if structure.json is not None:
        yield from _check_schema(f"{name}.json", structure.json)
    elif structure.choice:
        yield from _check_texts(f"{name}.choice", structure.choice, MAX_STRUCTURE_CHOICES)
    elif structure.regex is not None:
        yield from _check_size(f"{name}.regex", structure.regex, MAX_REGEX_BYTES)
    elif structure.grammar is not None:
        yield from _check_size(f"{name}.grammar", structure.grammar, MAX_GRAMMAR_BYTES)


def _check_outer_grammar(name: str, text: str) -> Iterator[str]:
    if "@structure" not in text:
        yield (
            f"{name}={_shorten(text)} does not refer to @structure. Use for example "
            'start: "Answer: " @structure.'
        )
    yield from _check_size(name, text, MAX_REGEX_BYTES)


def _structure_type_problem(structure: StructuredOutputsParams) -> str | None:
    """Return the message about the first field that has another type."""
    for name, hint in field_types(StructuredOutputsParams).items():
        value = getattr(structure, name)
        if not _matches(value, hint):
            words = _TYPE_WORDS[union_options(hint)[0]]
            return f"{name}={_shorten(value)} must be {words}."
    return None


def _check_size(name: str, text: str, limit: int) -> Iterator[str]:
    nbytes = len(text.encode("utf-8", "surrogatepass"))
    if nbytes > limit:
        yield f"{name} has {nbytes} bytes, but the limit is {limit}. Use a shorter one."
    elif not text:
        yield f"{name} is an empty text, which allows no output. Leave it unset."


def _check_schema(name: str, text: str) -> Iterator[str]:
    """Yield the message about a JSON schema that is too large, or no JSON object."""
    sizes = list(_check_size(name, text, MAX_SCHEMA_BYTES))
    if sizes:
        yield from sizes
        return
    example = '{"type": "object"}'
    try:
        schema = parse_json(text)
    except ValueError as error:
        yield f"{name} is not JSON ({error}). Use a schema, such as {example}."
        return
    if not isinstance(schema, dict):
        yield f"{name}={_shorten(text)} must be an object. Use a schema, such as {example}."
    elif _measure_nesting(schema) > MAX_SCHEMA_NESTING:
        yield (
            f"{name} has arrays and objects nested more than {MAX_SCHEMA_NESTING} levels. Use "
            "fewer, or $defs."
        )


def _measure_nesting(document: object) -> int:
    """Return the number of levels of arrays and objects in parsed JSON."""
    depth, level = 0, [document]
    while level := [value for value in level if isinstance(value, list | dict)]:
        depth += 1
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    return depth


_CHECKS: Mapping[str, Callable[[SamplingParams], Iterator[str]]] = {
    "stop": lambda params: _check_texts("stop", params.stop, MAX_STOP_STRINGS),
    "bad_words": lambda params: _check_texts("bad_words", params.bad_words, MAX_BANNED_TOKENS),
    "visible_special_tokens": lambda params: _check_texts(
        "visible_special_tokens", params.visible_special_tokens, MAX_STOP_STRINGS
    ),
    "seed": _check_seed,
    "cache_salt": _check_cache_salt,
    "logit_bias": _check_logit_bias,
    "structured_outputs": _check_structure,
}
"""Checks of single fields by name, beyond type and range."""


def _token_id_problems(params: SamplingParams, name: str, vocab_size: int | None) -> list[str]:
    """Return the messages about a field of token ids: their number and range."""
    value = getattr(params, name)
    if value is None:
        return []
    ids = [token for token, _ in value] if name == "logit_bias" else list(value)
    limit = vocab_size if name == "allowed_token_ids" else MAX_BIASED_TOKENS
    problems = []
    if name == "allowed_token_ids" and not ids:
        problems.append(f"{name} is empty, so no token could be sampled. Leave it unset.")
    if limit is not None and len(ids) > limit:
        problems.append(
            f"{name} has {len(ids)} token ids, but the limit is {limit}. Pass {limit} or less."
        )
        ids = ids[:limit]
    last = math.inf if vocab_size is None else vocab_size - 1
    invalid = next((token for token in ids if not 0 <= token <= last), None)
    if invalid is not None:
        valid = "at least 0" if vocab_size is None else f"from 0 to {last}"
        problems.append(
            f"{name} has the token id {_shorten(invalid)}: ids of the model are {valid}. Use an id "
            "of its tokenizer."
        )
    return problems


def _min_tokens_problems(params: SamplingParams) -> list[str]:
    """Return the message about more tokens required than allowed."""
    limit = params.max_new_tokens
    if limit is None or limit < 0 or params.min_tokens <= limit:
        return []
    return [
        f"min_tokens={params.min_tokens} is more than max_new_tokens={limit}, so the output could "
        f"not end. Set min_tokens to {limit} or less."
    ]
