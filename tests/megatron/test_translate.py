"""Tests of megalith/megatron/translate.py."""

from collections.abc import Sequence

from megalith.config.data import TokenizerConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml, from_dict, to_dict
from megalith.megatron.parse import MegatronFlag, known_flags, mapped_flags
from megalith.megatron.translate import Translation, named_tokenizer, translate
from megalith.rules.run import run_problems
from tests.megatron.conftest import Translate


def test_llama_is_translated_to_a_valid_run(tiny: Translate) -> None:
    done = tiny(
        "--bf16 --tensor-model-parallel-size 3 --sequence-parallel --seq-length 33", world=6
    )
    assert done.run is not None and done.problems == () and done.refusals(strict=True) == []
    assert done.run.name == "tiny"
    assert run_problems(done.run, done.ranks) == []
    assert from_dict(TrainRun, to_dict(done.run)) == done.run
    assert "num_kv_heads: 3" in dump_yaml(done.run)


def test_all_problems_are_reported_together(tiny: Translate) -> None:
    done = tiny(
        "--hybrid-layer-pattern M* --lr fast --is-hybrid-model --nonsense --spec x",
        without=("--num-layers",),
    )
    assert done.run is None and len(done.problems) == 3
    assert len(done.refusals(strict=False)) == 6


def test_values_out_of_range_violate_rules_without_a_crash(tiny: Translate) -> None:
    flags = [name for name, flag in mapped_flags().items() if flag.type in ("int", "float")]
    for flag in flags:
        for value in ("0", "-1", "100000"):
            done = tiny(f"{flag} {value}")
            assert done.run is None or isinstance(run_problems(done.run, done.ranks), list), flag
    assert run_problems(*_run_and_ranks(tiny("--vocab-size -1"))) != []


def _run_and_ranks(done: Translation) -> tuple[TrainRun, int]:
    assert done.run is not None
    return done.run, done.ranks


def test_empty_arguments_report_all_missing_flags() -> None:
    missing = {problem.split()[0] for problem in translate([], name="x").problems}
    sizes = {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
        "--seq-length",
    }
    assert {*sizes, "--micro-batch-size", "--global-batch-size", "--lr", "--train-iters"} <= missing


def _sample_words(flag: MegatronFlag | None) -> Sequence[str]:
    """Return words that may follow a flag."""
    if flag is None or flag.type == "switch":
        return ()
    if flag.type == "choice":
        return flag.choices[:1]
    return {"int": ("3",), "float": ("0.5",)}.get(flag.type, ("a",))


def test_every_flag_is_reported(tiny: Translate) -> None:
    """No flag is ignored silently: there is a report or a problem about it."""
    for name in known_flags():
        flag = mapped_flags().get(name)
        done = tiny(" ".join((name, *_sample_words(flag))))
        output = [entry.flag for entry in done.entries] + list(done.problems)
        first_name = flag.flag if flag else name
        assert any(text.split()[0].rstrip(":") == first_name for text in output), name


def test_tokenizer_without_vocabulary_size_is_returned() -> None:
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "folder"]
    assert named_tokenizer(words) == TokenizerConfig(kind="huggingface", path="folder")
    assert named_tokenizer([*words, "--vocab-size", "5"]) is None
    assert named_tokenizer(["--tokenizer-type", "NullTokenizer"]) is None
    assert named_tokenizer(words[:2]) is None
