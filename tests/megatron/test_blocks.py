"""Tests of megalith/megatron/blocks.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.config.model import LayersConfig
from megalith.rules.run import model_problems
from tests.megatron.conftest import Translate

PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
BLOCKS: list[dict[str, Any]] = [
    {"attention": {"n_heads_in_group": 2}, "mlp": {"ffn_hidden_size": 80}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 4.1}},
]
FILE: dict[str, Any] = {
    "block_configs": BLOCKS,
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "vocab_size": 999,
}
SIZES = ("model.num_kv_heads", "model.ffn_hidden_size")
STRETCHED = "--use-rope-scaling --rope-scaling-factor 8.0"


def as_word(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def test_a_file_and_its_text_are_the_same_layers(tiny: Translate, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(FILE))
    runs = [tiny(f"{PATH} {file}").run, tiny(f"{TEXT} {as_word(FILE)}").run]
    assert runs[0] == runs[1] and runs[0] is not None
    model = runs[0].model
    assert (model.num_kv_heads, model.ffn_hidden_size) == (3, 512)
    assert model.layers == LayersConfig(attention=("full", "none"), ffn_hidden_size=(80, 512))
    assert model_problems(runs[0]) == []
    assert file.read_text() == json.dumps(FILE)


def test_a_text_goes_before_its_file_which_is_not_even_looked_for(tiny: Translate) -> None:
    done = tiny(f"{PATH} gone.json {TEXT} {as_word(FILE)}")
    assert done.run is not None and done.run.model.layers.attention == ("full", "none")
    (entry,) = [entry for entry in done.entries if entry.flag.startswith(PATH)]
    assert (entry.verdict, entry.text) == ("already", f"{TEXT} is read in its place")
    assert done.refusals(strict=True) == []
    (text,) = tiny(f"{PATH} gone.json {TEXT} nothing").problems
    assert text.startswith(f"{TEXT} nothing: Expecting value")


def test_text_without_a_file_is_reported_as_equal_layers_in_megatron(tiny: Translate) -> None:
    done = tiny(f"{TEXT} {as_word(FILE)}")
    (entry,) = [entry for entry in done.entries if entry.flag == TEXT]
    assert (
        entry.verdict == "explained"
        and f"but builds equal layers unless {PATH} is given, too" in entry.text
    )
    assert done.refusals(strict=False) == []
    assert (
        done.refusals(strict=True) == [f"{TEXT}: {entry.text}."]
        and f"Use {PATH} with a file" in entry.text
    )
    for alike in ({"ffn_hidden_size": 160}, {}):
        equal = {"block_configs": [{"attention": {"n_heads_in_group": 2}, "mlp": alike}] * 2}
        assert tiny(f"{TEXT} {as_word(equal)}").refusals(strict=True) == []


def test_each_size_stands_in_the_list_once(tiny: Translate, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(FILE))
    done = tiny(f"{PATH} {file}")
    message = [
        (entry.flag.split()[0], entry.value) for entry in done.entries if entry.setting in SIZES
    ]
    assert message == [("--num-query-groups", 3), (PATH, 512)]
    (entry,) = [entry for entry in done.entries if entry.flag.startswith("--ffn-hidden-size")]
    assert (entry.verdict, entry.text) == (
        "already",
        f"is read for layers that have no width in {PATH} only",
    )
    assert done.refusals(strict=True) == []
    left_out = tiny(f"{PATH} {file}", without=("--ffn-hidden-size",))
    assert [entry.value for entry in left_out.entries if entry.setting == SIZES[1]] == [512]


def test_different_number_of_kv_heads_is_reported(tiny: Translate) -> None:
    fewer = {
        **FILE,
        "block_configs": [{"attention": {"n_heads_in_group": 3}, "mlp": {}}, BLOCKS[1]],
    }
    (text,) = tiny(f"{TEXT} {as_word(fewer)}").problems
    assert text == (
        f"{TEXT}: block_configs has 2 key/value heads, and --num-query-groups makes it 3. Set "
        "--num-query-groups to 2."
    )
    (text,) = tiny(
        f"{TEXT} {as_word(fewer)}", without=("--group-query-attention", "--num-query-groups")
    ).problems
    assert text == (
        f"{TEXT}: block_configs has 2 key/value heads, and there would be 6. Pass "
        "--group-query-attention "
        f"--num-query-groups 2."
    )
    assert (
        tiny(
            f"{TEXT} {as_word(fewer)} --num-query-groups 2", without=("--num-query-groups",)
        ).problems
        == ()
    )
    nowhere = {"block_configs": [{"attention": {"no_op": True}, "mlp": {}}] * 2}
    assert tiny(f"{TEXT} {as_word(nowhere)}").problems == ()


def test_blocks_that_say_no_size_have_that_of_the_arguments(tiny: Translate) -> None:
    run = tiny(f"{TEXT} {as_word({'block_configs': [{'attention': {}, 'mlp': {}}] * 2})}").run
    plain = tiny().run
    assert run is not None and plain is not None and run.model == plain.model


def test_the_known_layers_of_llama_3_are_stretched_as_the_file_says(tiny: Translate) -> None:
    stretched = {**FILE, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}
    run = tiny(f"{TEXT} {as_word(stretched)} {STRETCHED}").run
    assert run is not None and run.model.rope.factor == 8.0
    (text,) = tiny(f"{TEXT} {as_word(stretched)}").problems
    assert text == (
        f"{TEXT}: rope_scaling.factor=8.0, and positions would be not stretched. Pass "
        "--use-rope-scaling "
        f"--rope-scaling-factor 8.0."
    )
    (text,) = tiny(
        f"{TEXT} {as_word(stretched)} --use-rope-scaling --rope-scaling-factor 4.0"
    ).problems
    assert "positions would be stretched by llama3, 4.0. Pass" in text


def test_all_mismatches_are_reported_together(tiny: Translate) -> None:
    other = {
        **FILE,
        "hidden_size": 100,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "num_attention_heads": 12,
    }
    done = tiny(
        f"{TEXT} {as_word(other)} --rotary-percent 0.5 --num-experts 4",
        without=("--swiglu", "--normalization"),
    )
    texts = [text.removeprefix(f"{TEXT}: ") for text in done.problems]
    assert texts == [
        "these layers need --swiglu, and model.activation would be 'gelu'. Pass --swiglu.",
        "these layers need --swiglu, and model.gated would be False. Pass --swiglu.",
        "these layers need --normalization RMSNorm, and model.norm would be 'layer'. Pass "
        "--normalization RMSNorm.",
        "these layers need --rotary-percent 1.0, and model.rope.fraction would be 0.5. Pass "
        "--rotary-percent 1.0.",
        "blocks have no word for --num-experts 4. Remove --num-experts, or the file of layers.",
        "hidden_size=100, and --hidden-size makes it 96. Set --hidden-size to 100.",
        "num_attention_heads=12, and --num-attention-heads makes it 6. Set --num-attention-heads "
        "to 12.",
        "rope_theta=500000.0, and --rotary-base makes it 10000.0. Set --rotary-base to 500000.0.",
        "tie_word_embeddings=True, the other way round. Remove "
        "--untie-embeddings-and-output-weights.",
    ]


def test_invalid_blocks_are_reported_with_their_index(tiny: Translate) -> None:
    wrong = {
        "block_configs": [
            {"attention": {"n_heads_in_group": 4}, "mlp": {}},
            {"attention": {}, "mlp": {"moe": 1}},
        ]
    }
    found = tiny(f"{TEXT} {as_word(wrong)}").problems
    assert found == (
        f"{TEXT}: block_configs[0].attention.n_heads_in_group=4 must be a whole number that "
        "divides the 6 query heads. "
        f"Use a file that says so.",
        f"{TEXT}: block_configs[1].mlp.moe=1 is an unknown field, expected null or false. Use a "
        "file that "
        "says so.",
    )
    (text,) = tiny(f"{TEXT} {as_word({'block_configs': BLOCKS * 2})}").problems
    assert "block_configs has 4 entries, expected a list with one for each of 2 layers." in text
    (text,) = tiny(f"{TEXT} {as_word({})}").problems
    assert "block_configs has None, expected a list" in text


@pytest.mark.parametrize(
    ("flag", "given", "output"),
    [
        (PATH, "gone.json", f"{PATH} gone.json: "),
        (TEXT, "{", f"{TEXT} {{: "),
        (TEXT, "[]", "holds [], expected a JSON object with block_configs."),
    ],
)
def test_unreadable_file_is_reported(tiny: Translate, flag: str, given: str, output: str) -> None:
    done = tiny(f"{flag} {given}")
    assert done.run is None and len(done.problems) == 1 and output in done.problems[0]
    assert "block_configs" in done.problems[0]


def test_missing_sizes_are_reported_once_by_name(tiny: Translate) -> None:
    done = tiny(f"{TEXT} {as_word({'block_configs': BLOCKS})}", without=("--num-layers",))
    assert [
        text for text in done.problems if "block" in text
    ] == [] and "--num-layers is missing" in done.problems[0]


def test_nothing_is_read_where_nothing_is_named(tiny: Translate) -> None:
    run = tiny().run
    assert run is not None and run.model.layers == LayersConfig()
