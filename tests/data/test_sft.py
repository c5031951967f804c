"""Rows are filled with whole conversations: what is learned, what is counted, in which order, and
what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megalith.config.data import DataConfig, Packing, SFTConfig
from megalith.data.build import Splits, build_datasets
from megalith.data.chat_template import BUILT_IN, ChatTemplate
from megalith.data.huggingface import HuggingFaceTokenizer, train_bpe
from megalith.data.packs import pack_first_fit, write_packs
from megalith.data.sample import SampleSettings
from megalith.data.sft import ConversationDataset, build_conversations
from megalith.data.tokenizer import ByteTokenizer, Tokenizer
from megalith.data.tokenizer_formats import SentencePieceTokenizer
from megalith.errors import ConfigError, DataError

BYTES = ByteTokenizer()
PLAIN = SFTConfig(mock_conversations=1, template="identity")


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(user: str, answer: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer, **more},
        ]
    }


def build(
    data: DataConfig,
    *,
    seq_len: int = 16,
    num_samples: int | None = None,
    tokenizer: Tokenizer = BYTES,
    seed: int = 1,
) -> ConversationDataset:
    return build_conversations(
        data,
        SampleSettings(seq_len=seq_len, seed=seed, vocab_size=tokenizer.vocab_size),
        split="train",
        num_samples=num_samples,
        tokenizer=tokenizer,
        tokenizer_path=None,
    )


def of_files(*paths: str, **settings: Any) -> DataConfig:
    return DataConfig(sft=SFTConfig(path=paths, template="identity", **settings))


def test_row_has_labels_per_document_and_ends_in_padding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk("abc", "de"), talk("f", "gh"))
    row = build(of_files(path, shuffle="none", packing="greedy")).sample(0)
    assert row.lengths == (5, 3, 8) and row.num_valid == 8
    assert bytes(row.ids[:8].tolist()) == b"abcdefgh", (
        "the end of a turn is predicted, and nothing follows it"
    )
    assert row.labels[:8].tolist() == [-1, -1, 100, 101, 256, 103, 104, 256]
    assert (row.labels[8:] == -1).all() and (row.ids[8:] == 0).all()
    assert row.blank().lengths == (16,) and (row.blank().labels == -1).all()


def test_end_of_turn_is_trained_on_even_if_it_is_the_padding_token(tmp_path: Path) -> None:
    class EndIsZero(ByteTokenizer):
        eod = 0

    path = write(tmp_path / "a.jsonl", talk("abc", "de"))
    assert build(of_files(path), tokenizer=EndIsZero()).sample(0).labels[:5].tolist() == [
        -1,
        -1,
        100,
        101,
        0,
    ]


def test_all_tokens_can_be_trained_on_and_single_turns_excluded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", talk("abc", "de"))
    assert build(of_files(path, loss_on="all")).sample(0).labels[:5].tolist() == [
        98,
        99,
        100,
        101,
        256,
    ]
    path = write(tmp_path / "b.jsonl", talk("abc", "de", train=False), talk("ab", "c"))
    dataset = build(of_files(path))
    assert dataset.report.masked == 1 and dataset.sample(0).lengths == (3, 13)
    with pytest.raises(
        DataError, match=r"b.jsonl:1: \"train\" selects turns .*Set data.sft.loss_on=assistant"
    ):
        build(of_files(path, loss_on="all"))


@pytest.mark.parametrize("packing", ["best_fit", "greedy", "row"])
def test_every_epoch_has_every_conversation_once_in_an_order_of_its_own(
    packing: Packing, tmp_path: Path
) -> None:
    rows = [talk(f"{n:02}" + "x" * (n % 5), "y" * (1 + n % 3)) for n in range(31)]
    path = write(tmp_path / "a.jsonl", *rows)
    dataset = build(of_files(path, packing=packing), num_samples=60)
    assert dataset.num_samples >= 60
    starts: list[int] = []
    for k in range(dataset.num_samples):
        row = dataset.sample(k)
        begins = np.cumsum([0, *row.lengths])[:-1]
        starts += [int(bytes(row.ids[at : at + 2].tolist())) for at in begins if at < row.num_valid]
    epochs = [starts[at : at + 31] for at in range(0, len(starts), 31)]
    assert len(starts) % 31 == 0 and len(epochs) >= 2
    assert all(sorted(epoch) == list(range(31)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    unshuffled = build(of_files(path, packing=packing, shuffle="none"), num_samples=60)
    assert (
        unshuffled.sample(0).ids.tolist() == unshuffled.sample(unshuffled.report.rows).ids.tolist()
    )


def test_row_packing_separates_lines_and_keeps_conversations_together(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    several = {"messages": [*talk("a", "b")["messages"], system, *talk("c", "d")["messages"]]}
    path = write(tmp_path / "a.jsonl", several, talk("e", "f"))
    dataset = build(of_files(path, packing="row", shuffle="none"))
    assert [dataset.sample(k).lengths for k in range(2)] == [(2, 3, 11), (2, 14)]


def test_sample_depends_only_on_its_index_and_not_on_the_run_length(
    tmp_path: Path,
) -> None:
    data = DataConfig(sft=replace(PLAIN, mock_conversations=25))
    short, long = (build(data, seq_len=200, num_samples=count) for count in (3, 70))
    assert short.fingerprint == long.fingerprint
    for k in (2, 0, 1):
        assert short.sample(k).ids.tolist() == long.sample(k).ids.tolist()
        assert short.sample(k).lengths == long.sample(k).lengths
    other = build(data, seq_len=200, num_samples=3, seed=2)
    assert (
        other.fingerprint != short.fingerprint
        and other.sample(0).ids.tolist() != short.sample(0).ids.tolist()
    )


def test_too_long_conversations_are_rejected_truncated_or_dropped_and_counted(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "a.jsonl", talk("ab", "c"), talk("a" * 6, "b" * 20), talk("a" * 30, "b")
    )
    message = (
        r"a.jsonl:2: a conversation has 27 tokens.*train.seq_len=16 has 17.*2 of 3.*Set "
        r"train.seq_len to 31, or"
    )
    with pytest.raises(DataError, match=message):
        build(of_files(path))
    cut = build(of_files(path, overlong="truncate"))
    assert (cut.report.truncated, cut.report.dropped, cut.report.masked) == (1, 0, 1)
    assert sorted(cut.sample(k).num_valid for k in range(2)) == [3, 16]
    assert str(cut.report).startswith(
        "3 conversations, 1 truncated, 1 dropped without a token to train on; 2 rows per epoch, 59"
    )
    left = build(of_files(path, overlong="drop"))
    assert (left.report.truncated, left.report.dropped, left.num_samples) == (0, 2, 1)


def test_run_without_any_label_is_rejected(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        talk("ab", "c", train=False),
        {"messages": [{"role": "user", "content": "x"}]},
    )
    with pytest.raises(
        DataError,
        match=r"of 2 conversations 0 are too long and 2 have no token to train on.*a.jsonl:1",
    ):
        build(of_files(path))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"0 conversations found in .*empty.jsonl. Set it to files"):
        build(of_files(str(tmp_path / "empty.jsonl")))


def test_token_across_a_turn_boundary_is_trained_on(
    tmp_path: Path,
) -> None:
    tokenizer = train_bpe(
        ["abc abc abc zz bcd bcd"] * 20, vocab_size=262, path=str(tmp_path / "tokenizer")
    )
    path = write(tmp_path / "a.jsonl", talk("zz", " d"), talk("zz a", "bc"))
    dataset = build(of_files(path, shuffle="none", packing="greedy"), tokenizer=tokenizer)
    whole = tokenizer.encode_marked("zz abc<|endoftext|>")
    row = dataset.sample(0)
    assert row.lengths[1] == len(whole) - 1 and len(tokenizer.encode(" abc")) == 1, (
        "a token has both turns"
    )
    assert row.ids[row.lengths[0] : row.num_valid].tolist() == whole[:-1]
    prompt = len(tokenizer.encode("zz")) - 1
    assert row.labels[row.lengths[0] : row.num_valid].tolist() == [-1] * prompt + whole[-2:]


@pytest.mark.parametrize(("name", "prefix"), [("nemotron-h-aligned", 0), ("nemotron-nano-v2", 3)])
def test_nemotron_formats_train_on_the_same_tokens_as_megatron(
    tmp_path: Path, name: str, prefix: int
) -> None:
    """Those of the assistant's turns, each rendered alone, but for the first three where turns have
    a header."""
    folder = tmp_path / "tokenizer"
    train_bpe(["User\nAssistant\nSystem\n"] * 9, vocab_size=290, path=str(folder))
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([f"<SPECIAL_{number}>" for number in (10, 11, 12)])
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(folder))
    turns = [
        ("system", "be brief"),
        ("user", "hi /think"),
        ("assistant", "a\nb"),
        ("user", "so"),
        ("assistant", "no."),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids, labels = list[int](), list[int]()
    for message in messages:
        turn = tokenizer.encode_marked(ChatTemplate(name, BUILT_IN[name]).render([message]))
        masked = prefix if message["role"] == "assistant" else len(turn)
        ids, labels = ids + turn, labels + [-1] * masked + turn[masked:]
    assert len(tokenizer.encode_marked("<SPECIAL_11>Assistant\n")) == 3
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    data = DataConfig(sft=SFTConfig(path=(path,), template=name, packing="row"))
    row = build(data, seq_len=60, tokenizer=tokenizer).sample(0)
    assert (
        row.ids[: row.num_valid].tolist() == ids[:-1]
        and row.labels[: row.num_valid].tolist() == labels[1:]
    )


def test_sentencepiece_labels_begin_with_the_answer_if_tokens_cross_the_border(
    tmp_path: Path,
) -> None:
    """Its pieces take the space before a word with them, and one is put before a text."""
    library = pytest.importorskip(
        "sentencepiece", reason="reads SentencePiece models, which needs the library"
    )
    text = tmp_path / "text"
    text.write_text("the answer is four and the other answer is five\n" * 20)
    library.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=285,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(str(tmp_path))
    path = write(
        tmp_path / "a.jsonl", talk("is ö the answer ", "four"), talk("answer", " is four\U0001f600")
    )
    dataset = build(
        of_files(path, shuffle="none", packing="greedy"), seq_len=80, tokenizer=tokenizer
    )
    row, end = dataset.sample(0), tokenizer.eod
    assert row.labels[: row.lengths[0]][-2:].tolist() == tokenizer.encode_marked("four</s>")[-2:]
    first, second = row.labels[: row.lengths[0]], row.labels[row.lengths[0] : row.num_valid]
    assert tokenizer.decode(first[first >= 0].tolist()) == "four" and first[-1] == second[-1] == end
    assert tokenizer.decode(second[second >= 0].tolist()).strip() == "is four\U0001f600"
    assert (
        row.ids[: row.lengths[0]].tolist()
        == tokenizer.encode_marked("is ö the answer four</s>")[:-1]
    )


def test_conversation_without_text_is_rejected_with_its_position(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", talk("ab", "c"), {"messages": [{"role": "user", "content": ""}]}
    )
    with pytest.raises(
        DataError,
        match=r"a.jsonl:2: identity renders its 1 messages as 0 tokens. Use a template that",
    ):
        build(of_files(path))


def test_special_tokens_that_the_template_writes_are_single_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    train_bpe(["abc abc"], vocab_size=258, path=str(folder))
    tokenizer = HuggingFaceTokenizer(str(folder))
    row = build(of_files(write(tmp_path / "a.jsonl", talk("ab", "c"))), tokenizer=tokenizer).sample(
        0
    )
    assert row.labels[row.num_valid - 1] == tokenizer.eod


def test_tokenized_conversations_are_cached_and_built_again_when_files_change(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.jsonl", talk("ab", "c"))
    first = build(of_files(path))
    kept = {file.name for file in (tmp_path / ".cache").glob("*.json")}
    assert len(kept) == 2 and build(of_files(path)).fingerprint == first.fingerprint
    assert {file.name for file in (tmp_path / ".cache").glob("*.json")} == kept
    assert build(of_files(str(tmp_path))).fingerprint == first.fingerprint, (
        "a folder is not read with its cache"
    )
    write(tmp_path / "a.jsonl", talk("ab", "cd"))
    assert build(of_files(path)).fingerprint != first.fingerprint


def splits(data: DataConfig, *, train: int = 0, valid: int = 0, test: int = 0) -> Splits:
    return build_datasets(
        data,
        SampleSettings(seq_len=300, seed=1, vocab_size=257, eod=256),
        tokenizer=BYTES,
        train_samples=train,
        valid_samples=valid,
        test_samples=test,
    )


def test_the_validation_split_has_conversations_of_its_own(tmp_path: Path) -> None:
    built = splits(DataConfig(sft=PLAIN), train=2, valid=1)
    assert built.train is not None and built.valid is not None and built.test is None
    assert [note.split(" ")[:2] for note in built.notes] == [["train:", "1"], ["valid:", "100"]]
    path = write(tmp_path / "a.jsonl", talk("ab", "c"))
    assert splits(of_files(path, valid_path=(path,)), valid=1).valid is not None
    with pytest.raises(
        ConfigError, match=r"data.sft has no valid conversations.*Set data.sft.valid_path, or"
    ):
        splits(of_files(path), valid=1)
    with pytest.raises(ConfigError, match="data.sft has no test conversations"):
        splits(DataConfig(sft=PLAIN), test=1)


def talks(**settings: Any) -> ConversationDataset:  # Any: of SFTConfig
    alone = settings.pop("alone", False)
    sft = SFTConfig(mock_conversations=30, template="identity", **settings)
    return build_conversations(
        DataConfig(sft=sft),
        SampleSettings(seq_len=150, seed=1, vocab_size=257, whole_documents=alone),
        split="train",
        num_samples=None,
        tokenizer=ByteTokenizer(),
        tokenizer_path=None,
    )


def test_conversations_alone_have_rows_of_their_own_length() -> None:
    rows, alone = talks(), talks(alone=True)
    samples = [alone.sample(k) for k in range(len(alone))]
    assert len(alone) == 30 > len(rows) and all(
        sample.lengths == (len(sample.ids),) for sample in samples
    )
    assert all(alone.document_lengths(k) == sample.lengths for k, sample in enumerate(samples))
    assert all(
        rows.document_lengths(k) == rows.sample(k).lengths_without_padding for k in range(len(rows))
    )
    assert sum(len(sample.ids) for sample in samples) == sum(
        rows.sample(k).num_valid for k in range(len(rows))
    )
    assert alone.fingerprint != rows.fingerprint
    assert "; 30 per epoch, " in str(alone.report) and "filled" not in str(alone.report)


def test_rows_of_a_file_of_packs_are_read_and_shuffled_in_each_epoch(tmp_path: Path) -> None:
    packing_input = talks().packing_input()
    filled = pack_first_fit(packing_input, 1)
    write_packs(tmp_path / "packs.npz", packing_input, filled)
    dataset = talks(packs=str(tmp_path / "packs.npz"))
    expected = {
        tuple(packing_input.lengths[filled.row(number)].tolist())
        for number in range(filled.num_rows)
    }
    assert (
        len(dataset) == filled.num_rows
        and {dataset.document_lengths(k) for k in range(len(dataset))} == expected
    )
    assert [dataset.document_lengths(k) for k in range(len(dataset))] != [
        tuple(packing_input.lengths[filled.row(number)].tolist())
        for number in range(filled.num_rows)
    ], "in another order"
    assert "packs " in dataset.fingerprint
    with pytest.raises(DataError, match="is not a file of packs"):
        talks(packs=str(tmp_path / "none"))
