"""Ours against transformers on random small weights: scores, loss, gradients, text, and the way
there and back.

`pytest -s tests/hf/test_parity.py` prints the figures of every family.
"""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.errors import ConfigError
from megalith.hf.convert import convert
from megalith.hf.families import FAMILIES
from megalith.hf.family import Family
from megalith.hf.folder import HFSource, HuggingFaceFolder, write_folder
from megalith.hf.pretrained import open_pretrained
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.plan.costs import num_parameters
from megalith.testing.tolerance import EXACT, assert_close, assert_equals, compare, relative_error
from megalith.verify.ranks import (
    Difference,
    choose_micro_batch_size,
    compare_with_one_process,
    layout_case,
)
from tests.hf.families import (
    CASES,
    FIRST,
    LONGROPE,
    Case,
    batch,
    our_gradients,
    our_model,
    saved,
)
from tests.infer.engines import build, run

transformers = pytest.importorskip("transformers")

SCORES, LOSS, GRADIENTS = 2e-5, 1e-6, 1e-4
"""Largest relative errors in fp32: sums in another order, once, averaged over many tokens, and back
through layers."""

TIE = 1e-4
"""Where the two best scores are closer, either may be chosen."""

BIDIRECTIONAL = [
    pytest.param(
        case, dtype, marks=[] if case in FIRST and dtype == torch.bfloat16 else pytest.mark.slow
    )
    for case in CASES
    for dtype in (torch.float32, torch.bfloat16)
]
FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "rope", {"high_freq_factor": 2.0}),
    ("llama, every head its own", "rope", {"factor": 2.0}),
    ("llama, dynamic", "rope", {"factor": 2.0}),
    ("mistral", "attention", {"window": 5}),
    ("qwen2", "attention", {"window_layers": (True, False)}),
    ("qwen2, yarn", "rope", {"attention_factor": 1.0}),
    ("qwen2, yarn", "rope", {"whole_pairs": False}),
    ("qwen3", "attention", {"scale": 0.3}),
    ("gemma", "", {"activation": "gelu"}),
    ("gemma", "", {"embedding_scale": 1.0}),
    ("gemma", "", {"zero_centered_gamma": False}),
    ("gemma2", "", {"logit_softcap": None}),
    ("gemma2", "attention", {"softcap": None}),
    ("gemma2", "attention", {"scale": None}),
    ("gemma3", "rope", {"local_theta": None}),
    ("gemma3", "rope", {"scaling": "none"}),
    ("gemma3, five of six", "attention", {"window_layers": (True,)}),
    ("olmo2", "", {"norm_eps": 1e-2}),
    ("smollm3", "rope", {"skip": ()}),
    ("granite", "", {"residual_scale": 1.0}),
    ("phi3, below the first length", "rope", {"original_max_position": 10}),
    ("phi3, above the first length", "rope", {"attention_factor": 1.0}),
    ("granite", "", {"logit_scale": 1.0}),
    ("llama4", "attention", {"window": 6}),
    ("llama4", "attention", {"chunked": False}),
    ("llama4", "attention", {"qk_norm_layers": ()}),
    ("llama4", "rope", {"skip": ()}),
    ("llama4", "rope", {"skip_growth": 0.4}),
    ("llama4", "rope", {"skip_step": 4}),
    ("llama4", "rope", {"interleaved": False}),
    ("llama4, every other layer", "attention", {"window_layers": ()}),
]
"""One setting wrong: what the comparison must be able to see."""

TEXTS = [
    *(pytest.param(case, 16, id=f"{case}-16") for case in FIRST),
    *(
        pytest.param(case, 64, id=f"{case}-64", marks=pytest.mark.slow)
        for case in CASES
        if case != "llama, dynamic"
    ),
]
"""A short text of every family, and long ones of all cases in `make test-all`; but for a model made
for 8 tokens."""

LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2, pipeline=PipelineConfig()),
    "cp2": ParallelConfig(cp=2),
    "tp2 pp2": ParallelConfig(tp=2, pp=2, pipeline=PipelineConfig()),
}
MIXED = "deepseek_v3, experts"
"""The first of its family has dense layers alone."""

LLAMA_LIKE = {"mistral", "qwen2", "qwen3", "olmo2", "smollm3", "granite", "phi3", "starcoder2"}
"""Families whose layers are those of Llama and Gemma with other constants or norms."""

UNDER_LAYOUTS = [
    *(
        pytest.param(
            case,
            layout,
            marks=[] if number % 3 == turn and case not in LLAMA_LIKE else pytest.mark.slow,
        )
        for number, case in enumerate(FIRST)
        for turn, layout in enumerate(LAYOUTS)
    ),
    *(pytest.param(MIXED, layout, marks=pytest.mark.slow) for layout in LAYOUTS),
    *(
        pytest.param(case, ("tp2", "cp2")[number % 2], marks=pytest.mark.slow)
        for number, case in enumerate(name for name in CASES if name not in (*FIRST, MIXED))
    ),
]
"""By default, one layout for each family that is not like Llama, in turn; four processes only in
`make test-all`. The other cases differ from these in heads and features, not in layer order:
each has a layout that shards the heads."""


def some(*names: str) -> list[Any]:
    """The first case of every family; all but these in `make test-all` only."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.slow) for name in FIRST]


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_every_gradient_match_transformers(name: str, tmp_path: Path) -> None:
    reference, folder = saved(CASES[name], tmp_path)
    ours = our_model(folder)
    ids, labels = batch(reference.config.vocab_size)
    tokens = LayerInputs(seq_params_from_rows(*ids.shape))

    scores = reference(ids).logits
    loss = cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    loss.backward()
    our_scores = ours.head.logits(ours.hidden_states(ids.flatten(), tokens))
    our_loss = ours.loss(ids.flatten(), labels.flatten(), tokens)
    our_loss.backward()

    head = folder.family.head  # which some families call otherwise in their files
    expected = {
        name.replace("lm_head.weight", head): part.grad
        for name, part in reference.named_parameters()
    }
    gradients = compare(our_gradients(ours, folder), expected)
    errors = (
        relative_error(our_scores, scores.flatten(0, 1)),
        relative_error(our_loss, loss),
        gradients.error,
    )
    print(
        f"{name}: scores {errors[0]:.1e}, loss {errors[1]:.1e}, gradients {errors[2]:.1e} "
        f"({gradients.worst})"
    )
    assert errors[0] <= SCORES and errors[1] <= LOSS and errors[2] <= GRADIENTS, errors
    assert gradients.unpaired == ()
    counted = num_parameters(replace(folder.model_config, pad_vocab_to_multiple_of=1))
    assert counted == sum(parameter.numel() for parameter in reference.parameters())
    assert all(tensor.any() for tensor in expected.values()), "equal zeros show nothing"


@pytest.mark.parametrize(("name", "part", "change"), FAULTS)
def test_every_setting_that_a_family_needs_changes_the_logits(
    name: str, part: str, change: dict[str, Any], tmp_path: Path
) -> None:
    reference, folder = saved(CASES[name], tmp_path)
    changes = {part: replace(getattr(folder.model_config, part), **change)} if part else change
    ids, _ = batch(reference.config.vocab_size)
    ours = our_model(folder, **changes)
    scores = ours.head.logits(
        ours.hidden_states(ids.flatten(), LayerInputs(seq_params_from_rows(*ids.shape)))
    )
    assert relative_error(scores, reference(ids).logits.flatten(0, 1)) > 3 * SCORES


@pytest.mark.parametrize(("name", "dtype"), BIDIRECTIONAL)
def test_export_is_read_by_from_pretrained_and_every_bit_comes_back(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference, _ = saved(CASES[name], tmp_path / "fp32")
    reference.to(dtype).save_pretrained(tmp_path / "theirs")
    folder = HuggingFaceFolder(tmp_path / "theirs")
    write_folder(
        tmp_path / "ours",
        folder.model_config,
        folder,
        shard_nbytes=6000,
        hf_source=folder.source,
    )
    reference, read = (  # theirs once more, since converting it has also rounded its frequencies
        transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", attn_implementation="eager"
        )
        for path in (tmp_path / "theirs", tmp_path / "ours")
    )
    assert (
        type(read) is type(reference) and len(list((tmp_path / "ours").glob("*.safetensors"))) >= 3
    )
    assert_close(dict(read.named_parameters()), dict(reference.named_parameters()), EXACT)
    ids, _ = batch(reference.config.vocab_size)
    assert_equals("scores", read(ids).logits, reference(ids).logits, EXACT)
    read.save_pretrained(tmp_path / "again")
    again = HuggingFaceFolder(tmp_path / "again")
    assert (
        again.model_config
        == folder.model_config
        == HuggingFaceFolder(tmp_path / "ours").model_config
    )
    assert_close(
        dict(our_model(again).named_parameters()), dict(our_model(folder).named_parameters()), EXACT
    )


@pytest.mark.parametrize(
    "name",
    [
        *some("qwen2", "qwen3", "phi3", "gpt2", "deepseek_v3"),
        pytest.param(MIXED, marks=pytest.mark.slow),
    ],
)
def test_a_round_trip_through_a_checkpoint_is_bit_exact(name: str, tmp_path: Path) -> None:
    saved(CASES[name], tmp_path / "theirs")
    convert(open_pretrained(tmp_path / "theirs"), tmp_path / "ours", "megalith")
    convert(open_pretrained(tmp_path / "ours"), tmp_path / "back", "huggingface")
    first, last = (
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / path, attn_implementation="eager"
        )
        for path in ("theirs", "back")
    )
    ids, _ = batch(first.config.vocab_size)
    assert type(first) is type(last)
    assert_close(dict(last.named_parameters()), dict(first.named_parameters()), EXACT)
    assert_equals("scores", last(ids).logits, first(ids).logits, EXACT)


def check_greedy_text(
    theirs: Any, prompt: list[int], text: list[int], *, use_cache: bool = True
) -> None:
    """Assert that transformers continues a prompt with `text`, up to a token whose logit is tied
    with the best."""
    settings = {
        "max_new_tokens": len(text),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    wanted = theirs.generate(torch.tensor([prompt]), **settings, use_cache=use_cache)[
        0, len(prompt) :
    ].tolist()
    assert len(wanted) == len(text)
    same = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=True)) if a != b), len(text))
    if same < len(text):
        best = theirs(torch.tensor([prompt + wanted[:same]])).logits[0, -1].topk(2)
        assert float(best.values[0] - best.values[1]) < TIE and text[same] in best.indices, (
            same,
            text,
            wanted,
        )


@pytest.mark.parametrize(("name", "length"), TEXTS)
def test_greedy_text_matches_transformers(name: str, length: int, tmp_path: Path) -> None:
    reference, folder = saved(CASES[name], tmp_path, std=0.5)
    ours = our_model(folder)
    prompts = [[5, 17, ours.config.vocab_size - 1, 3, 44], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    params = SamplingParams(temperature=0.0, max_new_tokens=length)
    outputs = run(build(ours), [(prompt, params) for prompt in prompts])
    results = [output.outputs[0].token_ids for output in outputs]
    for text, prompt in zip(results, prompts, strict=True):
        assert len(text) == length
        check_greedy_text(reference, prompt, text)
    assert len({token for text in results for token in text}) > 3, (
        "a text that only repeats itself shows little"
    )


def test_longrope_text_beyond_the_original_length_matches_transformers(
    tmp_path: Path,
) -> None:
    longrope = {**LONGROPE, "original_max_position_embeddings": 12}
    reference, folder = saved(Case("LlamaConfig", {"rope_parameters": longrope}), tmp_path, std=0.5)
    prompt = [5, 17, 3, 44, 1, 2, 3, 4]
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    (output,) = run(build(our_model(folder)), [(prompt, params)])
    check_greedy_text(reference, prompt, output.outputs[0].token_ids, use_cache=False)


def failed_checks(
    model: ModelConfig, parallel: ParallelConfig, *, documents: bool = False
) -> list[Difference]:
    """Return what differs between the layout and one process."""
    world, rows = parallel.tp * parallel.pp * parallel.cp, choose_micro_batch_size(parallel)
    case = layout_case(model, parallel, world, micro_batch_size=rows, documents=documents)
    return [difference for difference in compare_with_one_process(case) if not difference.holds]


@pytest.mark.parametrize(("name", "layout"), UNDER_LAYOUTS)
def test_every_layout_computes_what_one_process_computes(
    name: str, layout: str, tmp_path: Path
) -> None:
    _, folder = saved(CASES[name], tmp_path)
    model = replace(folder.model_config, pad_vocab_to_multiple_of=4)
    parallel = LAYOUTS[layout]
    if model.moe is not None:
        # whose tokens must be divided over tp; and experts with biases are whole on a rank
        parallel = replace(parallel, sp=parallel.tp > 1, etp=1 if model.moe.biases else None)
    assert model.hidden_size <= 64 and (parallel.pp == 1 or model.num_layers == 2)
    assert failed_checks(model, parallel) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_mtp_matches_one_process_in_every_layout(layout: str, tmp_path: Path) -> None:
    """Of which transformers has no class: the config is theirs, with the release's word for one
    prediction more, and its weights come back from a folder bit for bit
    (tests/hf/test_deepseek.py)."""
    _, folder = saved(CASES[MIXED], tmp_path)
    raw = folder.family.write_config(folder.model_config) | {"num_nextn_predict_layers": 1}
    model = replace(folder.family.read_config(raw), pad_vocab_to_multiple_of=4)
    assert model.mtp.num_layers == 1 and model.moe is not None and model.mla is not None
    parallel = replace(LAYOUTS[layout], sp=LAYOUTS[layout].tp > 1)
    assert failed_checks(model, parallel, documents=True) == []


def test_every_family_has_a_test_case() -> None:
    kinds = {getattr(transformers, case.kind).model_type for case in CASES.values()}
    # transformers has no class for it
    reference = {family.model_type for family in FAMILIES} - {"nemotron-nas"}
    assert kinds == reference and "nemotron-nas" not in transformers.CONFIG_MAPPING


@pytest.mark.parametrize("name", some("qwen2", "gemma3", "phi3"))
def test_a_model_is_exported_as_the_first_family_that_can_express_it(
    name: str, tmp_path: Path
) -> None:
    reference, folder = saved(CASES[name], tmp_path / "theirs")
    write_folder(tmp_path / "ours", folder.model_config, folder)
    ids, _ = batch(reference.config.vocab_size)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert relative_error(read(ids).logits, reference(ids).logits) <= SCORES
    odd = replace(folder.model_config, up_offset=0.5)
    there = folder.model_config.up_offset
    with pytest.raises(
        ConfigError,
        match=rf"model.up_offset=0.5: \w+ cannot express .* exported as {there}",
    ):
        write_folder(tmp_path / "x", odd, folder, hf_source=HFSource(folder.family))


@pytest.mark.parametrize("name", some("llama", "gemma3", "smollm3", "gpt2", "deepseek_v3"))
def test_no_value_of_any_field_raises_an_unexpected_error(name: str, tmp_path: Path) -> None:
    _, folder = saved(CASES[name], tmp_path)
    written = folder.family.write_config(folder.model_config)
    odd: tuple[Any, ...] = (
        None,
        True,
        0,
        -1,
        1,
        0.5,
        3,
        "x",
        "",
        [],
        [[1]],
        [None] * 4,
        {},
        {"a": 1},
        {"rope_type": []},
        {"full_attention": 3},
        {"rope_type": "yarn", "factor": 2},
        {"rope_theta": [1]},
    )
    texts = [
        refusal(folder.family, written | {field: value})
        for field, value in itertools.product(written, odd)
    ]
    assert all(re.search(r"must|expected|Remove|Use|Set", text) for text in texts if text)
    assert len(set(texts)) > 20


def refusal(family: Family, raw: dict[str, Any]) -> str:
    """What a family says against a config; "" where it takes it."""
    try:
        family.rules(family.read_config(raw))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_with_partial_biases_matches_its_llama_export(
    tmp_path: Path,
) -> None:
    reference, _ = saved(CASES["llama, biases"], tmp_path / "random")
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    reference.save_pretrained(tmp_path / "theirs")
    ids, _ = batch(97)
    folder = HuggingFaceFolder(tmp_path / "theirs")
    write_folder(tmp_path / "ours", replace(folder.model_config, output_bias=False), folder)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert_equals("scores", read(ids).logits, reference(ids).logits, EXACT)
