"""Stopping criteria: end tokens, lengths, and stop strings in streamed text of every tokenizer."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalith.config.generation import SamplingParams
from megalith.data.huggingface import train_bpe
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer, StreamDecoder, Tokenizer
from megalith.infer.stopping_criteria import StopCheck, StoppingCriteria, TextStream
from tests.cases import loop_over
from tests.infer.tokenizers import make_tokenizer

EOS = 256
TEXTS = (
    "ab END cd",
    "Grüße 日本 🧱🧑\u200d🚀!",
    "aaabaaab",
    "the other STO STOP the",
    "naïve ☕\n\n漢字 END",
)
"""Texts with characters of one to four bytes, a sequence of joined emoji, and repetitions."""


def criteria(
    *,
    eos_ids: Sequence[int] = (EOS,),
    prompt: str = "",
    max_total_tokens: int = 1000,
    **values: Any,
) -> StoppingCriteria:
    return StoppingCriteria(
        SamplingParams(**values),
        eos_ids=eos_ids,
        prompt_ids=list(prompt.encode()),
        max_total_tokens=max_total_tokens,
        tokenizer=ByteTokenizer(),
    )


def run(stopping: StoppingCriteria, tokens: Sequence[int]) -> tuple[list[StopCheck], str]:
    """Check tokens until the output ends; returns the checks and the text."""
    checks = []
    for token in tokens:
        checks.append(stopping.check(token))
        if checks[-1].finish is not None:
            break
    return checks, "".join(check.text for check in checks)


def outcome(stopping: StoppingCriteria, text: str, *more: int) -> tuple[str, int, Any, Any]:
    """The text, the number of tokens, the finish and its reason."""
    checks, final = run(stopping, [*text.encode(), *more])
    assert stopping.stream is not None
    if checks[-1].finish is not None:
        assert stopping.stream.text == final and stopping.flush() == ""
    return final, len(checks), checks[-1].finish, checks[-1].stop_reason


# --- end tokens and lengths


def test_end_tokens_end_the_output_without_their_text() -> None:
    assert outcome(criteria(), "ab", EOS, 65) == ("ab", 3, "stop", EOS)
    assert outcome(criteria(eos_ids=(EOS, ord("x"))), "abxc") == ("ab", 3, "stop", ord("x"))
    assert outcome(criteria(stop_token_ids=(ord("b"),)), "abc") == ("a", 2, "stop", ord("b"))
    included = criteria(stop_token_ids=(ord("b"),), include_stop_str_in_output=True)
    assert outcome(included, "abc") == ("ab", 2, "stop", ord("b"))


def test_ignored_eos_continues_but_stop_token_ids_do_not() -> None:
    stopping = criteria(ignore_eos=True, stop_token_ids=(ord("c"),))
    assert outcome(stopping, "a", EOS, *b"bc") == ("ab", 4, "stop", ord("c"))
    assert stopping.end_ids == {ord("c")}
    assert criteria(stop_token_ids=(3,)).end_ids == {EOS, 3}


def test_lengths_end_the_output() -> None:
    assert outcome(criteria(max_new_tokens=3), "abcd") == ("abc", 3, "length", None)
    assert outcome(criteria(max_new_tokens=1), "abcd") == ("a", 1, "length", None)
    context = criteria(prompt="12345", max_total_tokens=7)
    assert outcome(context, "abcd") == ("ab", 2, "context", None)
    both = criteria(prompt="12345", max_total_tokens=7, max_new_tokens=2)
    assert outcome(both, "abcd") == ("ab", 2, "length", None)


def test_end_token_that_is_the_last_allowed_token_is_a_stop() -> None:
    assert outcome(criteria(max_new_tokens=3), "ab", EOS) == ("ab", 3, "stop", EOS)
    assert outcome(criteria(max_total_tokens=3), "ab", EOS) == ("ab", 3, "stop", EOS)
    assert outcome(criteria(max_new_tokens=3, stop=("bc",)), "abc") == ("a", 3, "stop", "bc")


def test_no_stop_before_min_tokens() -> None:
    stopping = criteria(min_tokens=3, stop=("bc",), stop_token_ids=(ord("x"),))
    assert outcome(stopping, "xbcbc") == ("xbc", 5, "stop", "bc")
    # a stop string that begins before min_tokens and is complete after them matches
    assert outcome(criteria(min_tokens=2, stop=("bc",)), "abcd") == ("a", 3, "stop", "bc")
    assert outcome(criteria(min_tokens=3, stop=("bc",)), "abcd", EOS) == ("abcd", 5, "stop", EOS)
    assert outcome(criteria(min_tokens=2, max_new_tokens=2, stop=("b",)), "ab") == (
        "ab",
        2,
        "length",
        None,
    )


def test_output_without_a_tokenizer_has_no_text() -> None:
    stopping = StoppingCriteria(
        SamplingParams(), eos_ids=(5,), prompt_ids=[1], max_total_tokens=9, tokenizer=None
    )
    checks, text = run(stopping, [3, 4, 5, 6])
    assert (text, len(checks), checks[-1]) == ("", 3, StopCheck("", "stop", 5))
    assert stopping.flush() == ""


# --- stop strings


@loop_over(
    "case",
    [
        (("END",), "one END two", ("one ", 7, "stop", "END")),
        (("END", "on"), "one END two", ("", 2, "stop", "on")),
        (("bc", "abcd"), "xabcd", ("xa", 4, "stop", "bc")),  # complete first
        (("bc", "abc"), "xabcd", ("x", 4, "stop", "abc")),  # of two the longest
        (("aab",), "aaaab", ("aa", 5, "stop", "aab")),  # begins in a part of itself
        (("abac", "abab"), "zababac", ("z", 5, "stop", "abab")),
        (("日本",), "x日 日本 y", ("x日 ", 11, "stop", "日本")),
        (("🧱",), "a🧱b", ("a", 5, "stop", "🧱")),
        (("zz",), "a z", ("a z", 4, "stop", EOS)),
    ],
)
def test_first_complete_stop_string_ends_the_text(case: tuple[tuple[str, ...], str, Any]) -> None:
    stop, text, expected = case
    assert outcome(criteria(stop=stop), text, EOS) == expected
    kept = expected[0] + (expected[3] if isinstance(expected[3], str) else "")
    included = criteria(stop=stop, include_stop_str_in_output=True)
    assert outcome(included, text, EOS) == (kept, *expected[1:])


def test_stop_string_split_over_tokens_is_matched_and_text_after_it_dropped(
    tmp_path: Path,
) -> None:
    """Planted fault 20: a stop string missed across tokens, or text after it emitted."""
    tokenizer = train_bpe(["ab cd", "bcd"] * 4, vocab_size=300, path=str(tmp_path / "bpe"))
    for tokens in (["ab", "cd!"], ["a", "b", "c", "d", "!"], ["abcd!"]):
        ids = [token for text in tokens for token in tokenizer.encode(text)]
        stream = TextStream(tokenizer, stop=("bc",))
        deltas = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(deltas) == stream.text == "a" and stream.stop_string == "bc"


def test_only_a_beginning_of_a_stop_string_is_withheld() -> None:
    stream = TextStream(ByteTokenizer(), stop=("STOP", "OP!"))
    deltas = [stream.push(token) for token in b"a STOO STO"]
    assert deltas == ["a", " ", "", "", "", "STO", "O ", "", "", ""]
    assert stream.finish() == "STO" and stream.text == "a STOO STO"
    included = TextStream(ByteTokenizer(), stop=("STOP",), include_stop=True)
    assert [included.push(token) for token in b"aSTOP!"] == ["a", "S", "T", "O", "P", ""]


def test_text_does_not_change_after_a_stop_string() -> None:
    stream = TextStream(ByteTokenizer(), stop=("b",))
    assert [stream.push(token) for token in b"abcb"] == ["a", "", "", ""]
    assert stream.finish() == "" and stream.text == "a"


def test_withheld_text_is_returned_at_every_end() -> None:
    assert outcome(criteria(stop=("STOP",), max_new_tokens=4), "aSTOP") == (
        "aSTO",
        4,
        "length",
        None,
    )
    assert outcome(criteria(stop=("STOP",)), "aST", EOS) == ("aST", 4, "stop", EOS)
    assert outcome(criteria(max_new_tokens=2), "a🧱") == ("a�", 2, "length", None)
    aborted = criteria(stop=("STOP",))
    assert run(aborted, b"aST")[1] == "a" and aborted.flush() == "ST" and aborted.flush() == ""


def test_special_tokens_are_part_of_the_text_on_request() -> None:
    ids = [97, EOS, 98]
    for skip, text in ((True, "ab"), (False, "a<|endoftext|>b")):
        stream = TextStream(ByteTokenizer(), skip_special_tokens=skip)
        assert "".join(stream.push(token) for token in ids) + stream.finish() == text
    stream = TextStream(ByteTokenizer(), visible_special_tokens=("<|endoftext|>",))
    assert "".join(stream.push(token) for token in ids) == "a<|endoftext|>b"
    stream = TextStream(ByteTokenizer(), skip_special_tokens=False, stop=("oftext",))
    assert [stream.push(token) for token in ids] == ["a", "<|end", ""]


def test_first_space_of_the_output_is_kept_after_a_prompt() -> None:
    tokenizer = NullTokenizer(10)
    stream = TextStream(tokenizer, prompt_ids=[1, 2])
    assert stream.push(3) + stream.push(4) + stream.finish() == " 3 4"


# --- streams of every tokenizer


@pytest.fixture(params=["byte", "null", "bpe", "sentencepiece", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return make_tokenizer(request.param, tmp_path)


def reference_text(text: str, stop: Sequence[str], *, include: bool) -> str:
    """The text up to the stop string that is complete first, found without a state."""
    for size in range(1, len(text) + 1):
        matches = [one for one in stop if text[:size].endswith(one)]
        if matches:
            return text[: size - (0 if include else len(max(matches, key=len)))]
    return text


def random_stop_strings(text: str, generator: random.Random) -> list[str]:
    """Parts of the text and the same with another end, so that beginnings match more often."""
    stop = []
    for _ in range(generator.randint(0, 4)):
        first = generator.randrange(len(text) or 1)
        part = text[first : first + generator.randint(1, 6)]
        stop.append(part + generator.choice(["", "", "q", part[:1]]) or "q")
    return stop


def test_streamed_text_equals_the_final_text_for_every_tokenizer(tokenizer: Tokenizer) -> None:
    num_stopped = 0
    for seed in range(150):
        generator = random.Random(seed)
        if isinstance(tokenizer, NullTokenizer) or seed % 3 == 0:  # any ids, mostly invalid UTF-8
            ids = generator.choices(range(tokenizer.vocab_size), k=20)
        else:
            ids = tokenizer.encode("".join(generator.choices(TEXTS, k=2)))
        decoder = StreamDecoder(tokenizer)
        text = "".join(decoder.push(token) for token in ids) + decoder.finish()
        stop, include = random_stop_strings(text, generator), seed % 2 == 0
        stream, deltas = TextStream(tokenizer, stop=stop, include_stop=include), []
        for token in ids:
            deltas.append(stream.push(token))
            if stream.stop_string is not None:
                break
        num_stopped += stream.stop_string is not None
        deltas.append(stream.finish())
        expected = reference_text(text, stop, include=include)
        assert "".join(deltas) == stream.text == expected, f"seed {seed}"
        if seed % 3 and not isinstance(tokenizer, NullTokenizer):
            assert not any("\ufffd" in delta for delta in deltas), f"seed {seed}"
    assert 20 < num_stopped < 140


def test_tokens_are_kept_up_to_the_one_that_completes_the_stop_string() -> None:
    for stop in ("cd", "b", " END", "日"):
        text = "ab cd END 日本"
        checks, _ = run(criteria(stop=(stop,)), text.encode())
        assert len(checks) == len((text[: text.find(stop)] + stop).encode())
