import pytest

from megalith.data.chat_template import BUILT_IN, ChatTemplate
from megalith.data.tokenizer import ByteTokenizer
from megalith.infer.chat import Until
from megalith.models.companions import turn_ends


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_is_shown_up_to_the_end_however_it_arrives(size: int) -> None:
    text = "a < b <|im_ <|im_end|> never"
    until, shown = Until("<|im_end|>"), ""
    for at in range(0, len(text), size):
        shown += until.push(text[at : at + size])
        if until.found:
            break
    assert shown == "a < b <|im_ " and until.found and until.finish() == ""


def test_what_was_held_back_comes_out_where_nothing_follows() -> None:
    until = Until("<|im_end|>")
    assert (until.push("yes <|im"), until.finish(), until.found) == ("yes ", "<|im", False)
    assert Until("").push("all of it") == "all of it"


def test_a_turn_ends_by_a_token_or_where_there_is_none_by_its_text() -> None:
    tokenizer = ByteTokenizer()
    specials = {"eos_token": "<|endoftext|>"}
    assert turn_ends(ChatTemplate("t", BUILT_IN["identity"], specials), tokenizer) == (frozenset({256}), "")
    assert turn_ends(ChatTemplate("t", BUILT_IN["chatml"], specials), tokenizer) == (frozenset(), "<|im_end|>")
