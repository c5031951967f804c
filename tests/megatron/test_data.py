"""Data, tokenizer and fine-tuning settings from Megatron's arguments."""

import pytest

from megalith.config.data import data_problems
from megalith.megatron.translate import named_tokenizer
from megalith.plan.batch_assignment import budget_problems
from tests.megatron.conftest import Translate

REAL = ("--mock-data",)
HUB = ("--tokenizer-type", "--vocab-size")


def test_data_blend_and_split_are_copied(tiny: Translate) -> None:
    run = tiny(
        "--data-path 0.3 a 0.7 b --split 98,1,1 --data-cache-path c --no-mmap-bin-files",
        without=REAL,
    ).run
    assert run is not None and data_problems(run.data) == []
    assert run.data.path == ("0.3", "a", "0.7", "b")
    assert (run.data.split, run.data.cache_path, run.data.mmap, run.data.mock) == (
        "98,1,1",
        "c",
        False,
        False,
    )


@pytest.mark.parametrize("typed", ["'99,1,0'", "99,1,0", "[99,1,0]"])
def test_split_accepts_any_separators(tiny: Translate, typed: str) -> None:
    run = tiny(f"--split {typed}").run
    assert run is not None and run.data.split == "99,1,0"


def test_default_split_is_unset(tiny: Translate) -> None:
    run = tiny("--data-path a --split 969,30,1", without=REAL).run
    assert run is not None and run.data.split is None


def test_paths_per_split_are_copied(tiny: Translate) -> None:
    run = tiny("--train-data-path a b c --valid-data-path d --test-data-path e", without=REAL).run
    assert run is not None and data_problems(run.data) == []
    assert (run.data.train_path, run.data.valid_path, run.data.test_path) == (
        ("a", "b", "c"),
        ("d",),
        ("e",),
    )


@pytest.mark.parametrize(
    ("typed", "sampler"),
    [
        ("", "sequential"),
        ("--dataloader-type single", "sequential"),
        ("--no-data-sharding", "sequential"),
        ("--dataloader-type cyclic", "cyclic_per_rank"),
        ("--dataloader-type cyclic --no-data-sharding", "cyclic"),
    ],
)
def test_the_sampler_keeps_its_order(tiny: Translate, typed: str, sampler: str) -> None:
    done = tiny(typed)
    assert done.run is not None and done.run.data.sampler == sampler
    assert done.refusals(strict=True) == []


def test_resetting_the_attention_mask_makes_documents(tiny: Translate) -> None:
    done = tiny(
        "--reset-attention-mask --reset-position-ids --eod-mask-loss --calculate-per-token-loss"
    )
    assert done.run is not None
    assert done.run.data.document_masking and done.run.data.eod_mask_loss
    assert done.refusals(strict=True) == []


def test_masks_without_per_token_loss_change_the_numbers(tiny: Translate) -> None:
    for added in ("--eod-mask-loss", "--reset-attention-mask --eod-mask-loss"):
        assert tiny(added).refusals(strict=False) == []
        assert any("mean of the means" in refusal for refusal in tiny(added).refusals(strict=True))


def test_document_masking_without_eod_mask_drops_one_label(tiny: Translate) -> None:
    strict = tiny("--reset-attention-mask --calculate-per-token-loss").refusals(strict=True)
    assert len(strict) == 1 and "the first token of a document is not predicted" in strict[0]


def test_resetting_position_ids_alone_is_not_mapped(tiny: Translate) -> None:
    done = tiny("--reset-position-ids")
    assert done.run is not None and not done.run.data.document_masking
    assert (
        "--reset-position-ids: position ids restart only with the attention mask"
        in done.refusals(strict=True)[0]
    )


def test_null_tokenizer_uses_the_vocabulary_size(tiny: Translate) -> None:
    done = tiny()
    assert done.run is not None
    assert (done.run.tokenizer.kind, done.run.tokenizer.vocab_size, done.run.model.vocab_size) == (
        "null",
        128,
        128,
    )
    assert any("Megatron before 0.18 adds one more id" in entry.text for entry in done.entries)


def test_vocabulary_size_of_a_hugging_face_tokenizer(tiny: Translate) -> None:
    added = (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model folder "
        "--tokenizer-hf-no-include-special-tokens"
    )
    measured = tiny(added, without=HUB, tokenizer_vocab=777).run
    assert measured is not None
    tokenizer = measured.tokenizer
    assert (tokenizer.kind, tokenizer.path, tokenizer.add_special_tokens) == (
        "huggingface",
        "folder",
        False,
    )
    assert (tokenizer.vocab_size, measured.model.vocab_size) == (None, 777)
    given = tiny(f"{added} --vocab-size 800", without=HUB, tokenizer_vocab=777).run
    assert given is not None and given.model.vocab_size == 800
    unknown = tiny(added, without=HUB)
    assert unknown.run is None
    assert (
        "--tokenizer-model folder: the tokenizer's files are not on this machine"
        in unknown.problems[0]
    )
    assert "Pass --vocab-size" in unknown.problems[0]


def test_other_libraries_read_their_own_files(tiny: Translate) -> None:
    llama = tiny(
        "--tokenizer-type Llama2Tokenizer --tokenizer-model m", without=HUB, tokenizer_vocab=32000
    ).run
    assert llama is not None and llama.model.vocab_size == 32000
    assert (llama.tokenizer.kind, llama.tokenizer.path, llama.tokenizer.add_special_tokens) == (
        "sentencepiece",
        "m",
        True,
    )
    plain = tiny(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model m",
        without=HUB,
        tokenizer_vocab=9,
    ).run
    assert plain is not None and not plain.tokenizer.add_special_tokens
    added = (
        "--tokenizer-type TikTokenizer --tokenizer-model m --tiktoken-pattern v1 "
        "--tiktoken-special-tokens <a> <b>"
    )
    tiktoken = tiny(added, without=HUB).run
    assert (
        tiktoken is not None
        and tiktoken.model.vocab_size == tiktoken.tokenizer.vocab_size == 131072
    )
    assert (tiktoken.tokenizer.pattern, tiktoken.tokenizer.special_tokens) == ("v1", ("<a>", "<b>"))


def test_a_gpt2_tokenizer_is_read_from_its_two_files(tiny: Translate) -> None:
    files = "--vocab-file a/gpt2-vocab.json --merge-file a/gpt2-merges.txt"
    done = tiny(files, without=HUB, tokenizer_vocab=50257)
    assert done.run is not None and done.run.model.vocab_size == 50257
    assert (done.run.tokenizer.kind, done.run.tokenizer.path) == (
        "huggingface",
        "a/gpt2-vocab.json",
    )
    assert any(
        entry.flag.startswith("--merge-file") and "in the folder of --vocab-file" in entry.text
        for entry in done.entries
    )
    assert named_tokenizer(files.split()) == done.run.tokenizer
    unknown = tiny(files, without=HUB)
    assert (
        "--vocab-file a/gpt2-vocab.json: the tokenizer's files are not on this machine"
        in unknown.problems[0]
    )
    apart = tiny("--vocab-file a/gpt2-vocab.json --merge-file b/gpt2-merges.txt", without=HUB)
    assert (
        "must be in one folder, as NAMEvocab.json and NAMEmerges.txt. Pass such"
        in apart.refusals(strict=False)[0]
    )
    neither = tiny(without=HUB).refusals(strict=False)
    assert "the default, GPT2BPETokenizer, needs --vocab-file and --merge-file" in neither[0]


@pytest.mark.parametrize(
    "added", ["--tokenizer-type BertWordPieceCase", "--vocab-file v --merge-file w"]
)
def test_other_tokenizers_are_rejected_with_a_replacement(tiny: Translate, added: str) -> None:
    refusals = tiny(added, without=HUB).refusals(strict=False)
    assert len(refusals) == 1 and "tokenizer.json" in refusals[0]


def test_the_vocabulary_is_padded_as_megatron_pads_it(tiny: Translate) -> None:
    sizes = {
        "": 128,
        "--tensor-model-parallel-size 3": 384,
        "--make-vocab-size-divisible-by 8 --tensor-model-parallel-size 2": 16,
        "--padded-vocab-size 1000": 1000,
        "--no-pad-vocab-size": 1,
    }
    for added, multiple in sizes.items():
        run = tiny(added).run
        assert run is not None and run.model.pad_vocab_to_multiple_of == multiple
    known = (
        (50257, 1, 50304),
        (50257, 2, 50432),
        (50257, 4, 50688),
        (50257, 8, 51200),
        (32000, 2, 32000),
        (32000, 8, 32768),
        (128256, 2, 128256),
        (128256, 8, 129024),
        (151936, 1, 151936),
        (151936, 2, 152064),
        (151936, 8, 152576),
    )
    for size, tp, rows in known:
        run = tiny(f"--vocab-size {size} --tensor-model-parallel-size {tp}").run
        assert run is not None and run.model.padded_vocab_size() == rows


def test_padded_vocabulary_rows_are_explained(tiny: Translate) -> None:
    texts = [
        entry.text for entry in tiny("--vocab-size 100").entries if entry.verdict == "explained"
    ]
    assert any(
        "the 28 rows after the 100 tokens are never predicted" in text and "0.2469" in text
        for text in texts
    )
    assert not any("rows beyond" in entry.text for entry in tiny().entries)


# --- sft


SFT_HUB = ("--mock-data", "--tokenizer-type")
SFT = "--sft --tokenizer-type SFTTokenizer --tokenizer-model folder"


def test_conversations_are_packed_as_in_megatron(tiny: Translate) -> None:
    run = tiny(
        f"{SFT} --data-path a.jsonl --valid-data-path b.jsonl --sft-tokenizer-prompt-format "
        "identity",
        without=SFT_HUB,
    ).run
    assert run is not None and data_problems(run.data) == []
    sft = run.data.sft
    assert (sft.path, sft.valid_path, sft.template, sft.loss_on) == (
        ("a.jsonl",),
        ("b.jsonl",),
        "identity",
        "assistant",
    )
    assert (sft.packing, sft.shuffle, sft.overlong) == ("row", "none", "truncate")
    assert (
        run.data.path == () and run.tokenizer.kind == "huggingface" and run.train.eval_steps == 100
    )


def test_default_prompt_format_trains_on_all_tokens(
    tiny: Translate,
) -> None:
    done = tiny(
        f"{SFT} --data-path a.jsonl --sft-tokenizer-prompt-format default --eod-mask-loss",
        without=SFT_HUB,
    )
    assert done.run is not None and data_problems(done.run.data) == []
    assert (done.run.data.sft.template, done.run.data.sft.loss_on) == (None, "all")
    assert done.run.train.eval_steps == 0 and done.refusals(strict=True) == []


def test_default_prompt_format_of_sft_is_that_of_megatron(tiny: Translate) -> None:
    plain = f"{SFT} --data-path a.jsonl"
    for added, template in (
        ("", "nemotron-h-aligned"),
        ("--sft-tokenizer-prompt-format nemotron-nano-v2",) * 2,
    ):
        done = tiny(f"{plain} {added}", without=SFT_HUB)
        assert (
            done.run is not None
            and data_problems(done.run.data) == []
            and done.refusals(strict=True) == []
        )
        assert (done.run.data.sft.template, done.run.data.sft.loss_on) == (
            template.split()[-1],
            "assistant",
        )


def test_unknown_prompt_formats_change_the_numbers(tiny: Translate) -> None:
    other = f"{SFT} --data-path a.jsonl --sft-tokenizer-prompt-format gemma3"
    (text,) = tiny(other, without=SFT_HUB).refusals(strict=True)
    assert (
        "there is no built-in template gemma3. Write it to a Jinja file and set data.sft.template"
        in text
    )
    (text,) = tiny(
        f"{SFT} --data-path a.jsonl --split 9,1,0 --sft-tokenizer-prompt-format default",
        without=SFT_HUB,
    ).refusals(strict=True)
    assert "Split it, and pass the validation part with --valid-data-path" in text


def test_mock_data_with_sft_is_synthetic_conversations(tiny: Translate) -> None:
    run = tiny(f"{SFT} --sft-tokenizer-prompt-format identity", without=("--tokenizer-type",)).run
    assert run is not None and run.data.sft.mock_conversations == 10_000 and not run.data.mock
    assert data_problems(run.data) == []


def test_packed_conversations_have_a_token_budget(tiny: Translate) -> None:
    plain = f"{SFT} --data-path a.jsonl --sft-tokenizer-prompt-format identity --micro-batch-size 1"
    without = (*SFT_HUB, "--micro-batch-size")
    done = tiny(
        f"{plain} --sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 4096",
        without=without,
    )
    assert done.run is not None and done.refusals(strict=True) == []
    run = done.run
    assert run.train.tokens_per_microbatch == 4096 and run.data.sft.packing == "best_fit"
    assert budget_problems(run.train, run.parallel, run.data) == []
    other = tiny(f"{plain} --sequence-packing-scheduler default_dynamic_cp", without=without)
    (text,) = (entry.text for entry in other.entries if entry.verdict == "not mapped")
    assert "a context-parallel size per conversation" in text and "dp_balanced" in text
    assert (
        tiny(f"{plain} --max-seqlen-per-dp-cp-rank 64", without=without).refusals(strict=True) == []
    )
