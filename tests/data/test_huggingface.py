"""Hugging Face tokenizers: the same ids as transformers, the right end token, and clear
refusals."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast

from megalith.data.huggingface import HuggingFaceTokenizer, train_bpe
from megalith.data.tokenizer import appends_eod
from megalith.errors import DataError

TEXT = (
    "It was the best of times, it was the worst of times. Ça va? 12345 + 67 == {x: [1, 2]}\n\n "
    "   return None\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizers") / "bpe"
    train_bpe([TEXT] * 4, vocab_size=300, path=str(path))
    return str(path)


def changed(folder: str, target: Path, **settings: object) -> str:
    """A copy of the tokenizer with another tokenizer_config.json."""
    shutil.copytree(folder, target)
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(target)


def test_ids_equal_those_of_transformers(folder: str) -> None:
    ours, reference = HuggingFaceTokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for start in range(0, len(TEXT), 3):
        text = TEXT[start : start + 40]
        assert ours.encode(text) == reference(text).input_ids
        assert ours.decode(ours.encode(text)) == text
    assert (ours.eod, ours.vocab_size) == (reference.eos_token_id, len(reference))


def two_files(folder: str, target: Path, name: str = "") -> Path:
    """The vocabulary and the merges of a tokenizer.json, as GPT-2's were published."""
    model = json.loads((Path(folder) / "tokenizer.json").read_text())["model"]
    target.mkdir()
    (target / f"{name}vocab.json").write_text(json.dumps(model["vocab"]))
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (target / f"{name}merges.txt").write_text(
        "\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8"
    )
    return target / f"{name}vocab.json"


@pytest.mark.parametrize("name", ["", "gpt2-"])
def test_a_vocabulary_and_its_merges_are_the_tokenizer_of_gpt2(
    folder: str, tmp_path: Path, name: str
) -> None:
    file = two_files(folder, tmp_path / "two", name)
    ours = HuggingFaceTokenizer(str(file))
    reference = transformers.GPT2Tokenizer.from_pretrained(
        two_files(folder, tmp_path / "theirs").parent
    )
    for start in range(0, len(TEXT), 3):
        assert (
            ours.encode(TEXT[start:])
            == reference(TEXT[start:]).input_ids
            == HuggingFaceTokenizer(folder).encode(TEXT[start:])
        )
    assert (ours.eod, ours.vocab_size, ours.decode(ours.encode(TEXT))) == (0, 300, TEXT)
    assert pickle.loads(pickle.dumps(ours)).fingerprint == ours.fingerprint
    (tmp_path / "one").mkdir()
    for written, contents in ours.to_files().items():
        (tmp_path / "one" / written).write_bytes(contents)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "one")
    assert again(TEXT).input_ids == ours.encode(TEXT) and again.eos_token_id == ours.eod
    if not name:
        assert HuggingFaceTokenizer(str(file.parent)).fingerprint == ours.fingerprint, (
            "by the folder, too"
        )


def test_two_files_that_do_not_make_a_tokenizer_of_gpt2_are_rejected(
    folder: str, tmp_path: Path
) -> None:
    file = two_files(folder, tmp_path / "two")
    (file.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "CodeGenTokenizer"}')
    with pytest.raises(
        DataError, match=r"its tokenizer_class is CodeGenTokenizer, .* Use the tokenizer\.json"
    ):
        HuggingFaceTokenizer(str(file))
    (file.parent / "tokenizer_config.json").unlink()
    (file.parent / "merges.txt").write_text("not in the vocabulary\n")
    with pytest.raises(
        DataError,
        match=r"not a BPE vocabulary with merges\.txt .*Use two files of the same tokenizer",
    ):
        HuggingFaceTokenizer(str(file))
    (file.parent / "merges.txt").unlink()
    with pytest.raises(
        DataError, match=r"merges\.txt is missing in the same folder\. Copy it there"
    ):
        HuggingFaceTokenizer(str(file))
    with pytest.raises(
        DataError, match=r"the folder has no tokenizer\.json, only \['vocab\.json'\]"
    ):
        HuggingFaceTokenizer(str(file.parent))


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space=true"),
        (
            "tokenizer_config.json",
            {"add_bos_token": True, "bos_token": "!"},
            "add_bos_token=true, a token '!'",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"300": {"content": "<|pad|>"}}},
            "a token '<|pad|>'",
        ),
        (
            "special_tokens_map.json",
            {"eos_token": "!", "pad_token": "!"},
            "sets a token '!', which",
        ),
        ("added_tokens.json", {"<|pad|>": 300}, "a token '<|pad|>'"),
    ],
)
def test_tokenizer_whose_ids_differ_from_its_two_files_is_rejected(
    name: str, contents: dict[str, object], message: str, folder: str, tmp_path: Path
) -> None:
    file = two_files(folder, tmp_path / "two")
    defaults = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "unk_token": "<|endoftext|>",
    }
    rest = defaults if name == "tokenizer_config.json" else {}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(defaults))
    (file.parent / name).write_text(json.dumps(rest | contents))
    before = HuggingFaceTokenizer(str(two_files(folder, tmp_path / "plain")))
    reference = transformers.GPT2Tokenizer.from_pretrained(file.parent)
    text = "It was!<|pad|>"
    assert (reference(text).input_ids, reference.eos_token_id) != (
        before.encode(text),
        before.eod,
    ), "reason enough"
    with pytest.raises(
        DataError, match=rf"{re.escape(message)}.* Use the tokenizer\.json that transformers"
    ):
        HuggingFaceTokenizer(str(file))
    (file.parent / name).write_text(json.dumps(rest))
    assert HuggingFaceTokenizer(str(file)).encode("It was") == before.encode("It was")


def test_training_twice_gives_the_same_file(folder: str, tmp_path: Path) -> None:
    again = train_bpe([TEXT] * 4, vocab_size=300, path=str(tmp_path / "again"))
    assert again.fingerprint == HuggingFaceTokenizer(folder).fingerprint
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_frequent_words_become_one_id(folder: str) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    assert len(tokenizer.encode("It was the best of times")) < 14
    assert tokenizer.vocab_size == 300


def test_the_end_token_is_the_one_named(folder: str, tmp_path: Path) -> None:
    assert (
        HuggingFaceTokenizer(changed(folder, tmp_path / "a", eos_token={"content": "!"})).eod != 0
    )
    assert HuggingFaceTokenizer(changed(folder, tmp_path / "b")).eod == 0  # by its well-known name
    assert HuggingFaceTokenizer(folder, eod="!").eod == HuggingFaceTokenizer(folder).encode("!")[0]
    assert HuggingFaceTokenizer(changed(folder, tmp_path / "c", bos_token="<|endoftext|>")).bos == 0
    assert HuggingFaceTokenizer(folder).bos is None
    with pytest.raises(
        DataError, match=r"tokenizer\.eod='<none>' is not a token of .*Set it to one of its tokens"
    ):
        HuggingFaceTokenizer(folder, eod="<none>")


def test_missing_end_token_is_reported_when_requested(tmp_path: Path) -> None:
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 2
    with pytest.raises(
        DataError, match=r"the files name no end-of-document token\. Set tokenizer\.eod to the text"
    ):
        _ = tokenizer.eod


def test_special_tokens_of_the_tokenizer_can_be_omitted(folder: str, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    whole, bare = (
        HuggingFaceTokenizer(str(tmp_path), add_special_tokens=wanted) for wanted in (True, False)
    )
    assert whole.encode("best") == [*bare.encode("best"), 0]
    assert (appends_eod(whole), appends_eod(bare)) == (True, False)
    assert whole.fingerprint != bare.fingerprint


def test_a_name_in_the_local_cache_is_found(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert HuggingFaceTokenizer("someone/model").vocab_size == 300


@pytest.mark.parametrize("name", ["someone/missing", "/no/such/folder/here"])
def test_a_missing_tokenizer_is_rejected(name: str) -> None:
    text = (
        rf"tokenizer\.path={name}: neither a folder nor a model in the local Hugging Face "
        rf"cache\. Set it to a folder"
    )
    with pytest.raises(DataError, match=text):
        HuggingFaceTokenizer(name)


def test_folder_without_a_tokenizer_is_reported_with_its_contents(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        DataError,
        match=r"has no tokenizer\.json, only \['tokenizer\.model'\]\. Use a folder written by",
    ):
        HuggingFaceTokenizer(str(tmp_path))


def test_files_that_are_not_a_tokenizer_are_rejected(folder: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError,
        match=r"not a tokenizer that the installed tokenizers .* can read .*Use another file",
    ):
        HuggingFaceTokenizer(str(tmp_path))
    copy = changed(folder, tmp_path / "copy")
    (Path(copy) / "tokenizer_config.json").write_text("{")
    with pytest.raises(
        DataError,
        match=r"tokenizer_config\.json: not JSON .*Use the file that came with the tokenizer",
    ):
        HuggingFaceTokenizer(copy)


def test_vocabulary_size_without_merges_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"vocab_size=257: bytes and end-of-document token take 257 ids\. Use 258 or more",
    ):
        train_bpe([TEXT], vocab_size=257, path=str(tmp_path))


def test_a_tokenizer_is_not_trained_into_a_file(folder: str) -> None:
    with pytest.raises(
        DataError, match=r"tokenizer\.json: cannot be written .*Use a writable folder"
    ):
        train_bpe(["text"], vocab_size=300, path=f"{folder}/tokenizer.json")
