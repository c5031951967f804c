import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.readers import list_being_read
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import TokenizerConfig
from megalith.config.generation import SamplingParams
from megalith.config.kernels import (
    Kernel,
    KernelsConfig,
    KernelSetting,
    expand_kernel_setting,
)
from megalith.config.model import AttentionConfig, MLAConfig, MTPConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.serve import EngineConfig, InferenceParallelConfig, SpeculationConfig
from megalith.config.tree import dump_yaml
from megalith.data.huggingface import train_bpe
from megalith.errors import ConfigError, DataError
from megalith.hf.convert import convert
from megalith.hf.pretrained import open_pretrained
from megalith.hf.release import release_run
from megalith.infer import load
from megalith.infer.build import build_engine
from megalith.infer.layout import build_generation_mesh, generation_layout, open_source
from megalith.infer.load import (
    TextGenerator,
    kernel_problems,
    load_decoder,
    load_text_generator,
)
from megalith.kernels import cpu_threads
from megalith.kernels.activation import WeightedGatedFunction
from megalith.kernels.grouped_linear import GroupedLinearFunction
from megalith.kernels.linear_small_batch import ALL_ROW_COUNTS, NO_ROW_COUNTS, SmallBatchLimits
from megalith.kernels.norm import RMSNormFunction
from megalith.kernels.rope import RopeFunction
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn.mlp import MLP, GatedMLP
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.ranks import run_ranks
from tests.infer.engines import build, run

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=9, temperature=0.0)
SEEDED = SamplingParams(max_new_tokens=9, seed=1234)


def generate(
    model: Decoder, prompts: list[list[int]], params: SamplingParams, **engine: Any
) -> list[int]:
    """Return the generated tokens of all prompts, one after the other."""
    outputs = run(build(model, **engine), [(prompt, params) for prompt in prompts])
    return [token for output in outputs for token in output.outputs[0].token_ids]


def save(folder: Path, model: Decoder, tokenizer: TokenizerConfig) -> Path:
    entries = [
        CheckpointEntry(d.shard, "param", getattr(module, name))
        for d, module, name in iter_parameter_specs(model)
    ]
    text = dump_yaml(release_run("tiny", model.config, tokenizer, folder))
    return save_checkpoint(
        folder, 1, entries, {}, single_rank_group("world"), config_text=text
    ).path


def text(source: Path, dtype: torch.dtype = torch.float32) -> list[int]:
    generator = load_text_generator(
        open_source(str(source), 1), build_single_rank_mesh(), CPU, dtype
    )
    return generate(generator.model, [[5, 6, 7]], SEEDED)


def test_run_checkpoint_and_hugging_face_folder_generate_the_same_text(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(vocab_size=300))
    path = save(tmp_path / "run" / "checkpoints", model, TokenizerConfig())
    convert(open_pretrained(path), tmp_path / "theirs", "huggingface")
    convert(open_pretrained(tmp_path / "theirs"), tmp_path / "ours", "megalith")
    expected = generate(model, [[5, 6, 7]], SEEDED)
    for source in (tmp_path / "run", path, tmp_path / "theirs", tmp_path / "ours"):
        assert text(source) == expected


def test_checkpoint_that_is_loaded_is_marked(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)), TokenizerConfig())
    marked: list[set[str]] = []

    def load_marked(*arguments: Any) -> None:
        marked.append(list_being_read(tmp_path))
        load_decoder(*arguments)

    monkeypatch.setattr(load, "load_decoder", load_marked)
    text(path)
    assert marked == [{path.name}]
    assert list_being_read(tmp_path) == set()


def test_generation_supports_reference_kernels(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = MoEConfig(num_experts=3, top_k=2, ffn_hidden_size=5)
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300, moe=experts)), TokenizerConfig())

    def generate_ids(kernels: Kernel) -> list[int]:
        generator = load_text_generator(
            open_source(str(path), 1), build_single_rank_mesh(), CPU, torch.float64, kernels=kernels
        )
        engine = build_engine(generator, EngineConfig())
        (completion,) = run(engine, [([5, 6, 7], GREEDY)])[0].outputs
        if completion.cause is not None:
            raise completion.cause
        return completion.token_ids

    expected = generate_ids("auto")

    def forbid(*arguments: object) -> object:
        raise AssertionError("a fast form runs where plain definitions are asked for")

    for form in (RMSNormFunction, RopeFunction, WeightedGatedFunction, GroupedLinearFunction):
        monkeypatch.setattr(form, "forward", forbid)
    for name in ("_numba", "_torch"):
        monkeypatch.setattr(f"megalith.kernels.attention.paged.{name}", forbid)
    assert generate_ids("reference") == expected
    with pytest.raises(AssertionError, match="a fast form runs"):
        generate_ids("auto")


@pytest.mark.parametrize(
    ("kernels", "limits"),
    [
        (KernelsConfig(small_batch_matmul="numba", attention="paged"), ALL_ROW_COUNTS),
        (KernelsConfig(small_batch_matmul="torch"), NO_ROW_COUNTS),
        (KernelsConfig(all="torch"), NO_ROW_COUNTS),
        ("auto", SmallBatchLimits(fp32=3, bf16=2, int8=1)),
    ],
)
def test_engine_uses_the_backends_of_the_settings(
    kernels: KernelSetting,
    limits: SmallBatchLimits,
    tmp_path: Path,
    tiny: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not cpu_threads.openmp():
        pytest.skip("the kernels need torch's OpenMP library")
    measured = SmallBatchLimits(fp32=3, bf16=2, int8=1)
    monkeypatch.setattr("megalith.infer.build.load_or_measure_limits", lambda *, device: measured)
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)), TokenizerConfig())
    source = open_source(str(path), 1)
    expected = text(path)
    generator = load_text_generator(
        source, build_single_rank_mesh(), CPU, torch.float32, kernels=kernels
    )
    engine = build_engine(generator, EngineConfig())
    assert engine.runner.limits == limits
    unused = "_numba" if expand_kernel_setting(kernels).all == "torch" else "_torch"
    monkeypatch.setattr(f"megalith.kernels.attention.paged.{unused}", None)
    (completion,) = run(engine, [([5, 6, 7], SEEDED)])[0].outputs
    assert completion.cause is None and completion.token_ids == expected


def test_backends_that_inference_cannot_use_are_rejected(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)), TokenizerConfig())
    kernels = KernelsConfig(
        attention="flex", dropout="numba", norm="triton", small_batch_matmul="numba"
    )
    with pytest.raises(ConfigError) as error:
        load_text_generator(
            open_source(str(path), 1),
            build_single_rank_mesh(),
            CPU,
            torch.float64,
            kernels=kernels,
        )
    assert [line.strip()[3:] for line in str(error.value).splitlines()[1:]] == [
        "kernels.norm=triton: it works on GPUs, and this run is on cpu. Set kernels.norm to auto.",
        "kernels.dropout=numba: only training uses it. Set kernels.dropout to auto.",
        "kernels.attention=flex: the keys and values are in a paged KV cache, which it does not "
        "read. Set kernels.attention to auto.",
        "kernels.small_batch_matmul=numba: it takes fp32, bf16, and dtype=fp64. Set "
        "kernels.small_batch_matmul to auto.",
    ]
    relative = tiny.config(positions="relative")
    (problem,) = kernel_problems(KernelsConfig(attention="paged"), relative, CPU, torch.float32)
    assert problem.startswith("kernels.attention=paged: it does not support relative position")
    kernels = KernelsConfig(attention="triton", small_batch_matmul="triton")
    assert kernel_problems(kernels, tiny.config(), CPU, torch.float32) == [
        f"kernels.{op}=triton: it works on GPUs, and this run is on cpu. Set kernels.{op} to auto."
        for op in ("attention", "small_batch_matmul")
    ]


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("torch", "norm=torch"), (KernelsConfig(small_batch_matmul="torch"), "small_batch_matmul")],
)
def test_batch_invariance_rejects_other_backends(
    kernels: KernelSetting, name: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)), TokenizerConfig())
    generator = load_text_generator(
        open_source(str(path), 1), build_single_rank_mesh(), CPU, torch.float32, kernels=kernels
    )
    with pytest.raises(ConfigError, match=f"batch_invariant=true with kernels.{name}.*to auto"):
        build_engine(generator, EngineConfig(batch_invariant=True))


@pytest.mark.parametrize("shared", [None, 7], ids=["dense", "shared experts"])
def test_prompts_are_read_in_chunks_with_the_same_result(
    shared: int | None, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    moe = (
        None
        if shared is None
        else MoEConfig(num_experts=3, top_k=2, ffn_hidden_size=5, shared_ffn_hidden_size=shared)
    )
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300, moe=moe)), TokenizerConfig())
    prompts, params = [[5, 6, 7, 8, 9, 10, 11], [3, 4]], replace(GREEDY, max_new_tokens=4)

    def generate_ids(chunks: int) -> tuple[list[int], list[int]]:
        source = open_source(str(path), 1)
        generator = load_text_generator(
            source, build_single_rank_mesh(), CPU, torch.float64, mlp_chunks=chunks
        )
        reads: list[int] = []
        for mlp in (one for one in generator.model.modules() if isinstance(one, GatedMLP | MLP)):
            mlp.register_forward_pre_hook(lambda module, given: reads.append(len(given[0])))
        return generate(generator.model, prompts, params), reads

    (whole, once), (divided, reads) = generate_ids(1), generate_ids(4)
    assert divided == whole
    assert max(once) == 9 and reads[:4] == [3, 2, 2, 2] and max(reads) == 3
    assert reads[-1] == once[-1] == 2, "a token of each text is read at once"


def test_chunks_without_an_mlp_are_rejected(tmp_path: Path, tiny: SimpleNamespace) -> None:
    experts = MoEConfig(num_experts=3, top_k=2, ffn_hidden_size=5)
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300, moe=experts)), TokenizerConfig())
    source = open_source(str(path), 1)
    with pytest.raises(
        ConfigError,
        match=r"--mlp-chunks=2 chunks the input of dense MLPs, but no layer of .* Remove --mlp-ch",
    ):
        load_text_generator(source, build_single_rank_mesh(), CPU, torch.float32, mlp_chunks=2)


@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_mtp_layers_are_neither_built_nor_loaded(
    kind: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    latent = {"mla": MLAConfig(kv_rank=6, nope_dim=2, rope_dim=2, value_dim=4), "num_kv_heads": 6}
    config = tiny.config(vocab_size=300, mtp=MTPConfig(num_layers=1), **latent)
    path = save(tmp_path / "ours", tiny.model(config), TokenizerConfig())
    if kind == "folder":
        convert(open_pretrained(path), tmp_path / "theirs", "huggingface")
        path = tmp_path / "theirs"
    source = open_source(str(path), 1)
    assert source.model.mtp.num_layers == 1
    generator = load_text_generator(source, build_single_rank_mesh(), CPU, torch.float32)
    assert not any("mtp" in d.shard.name for d, _, _ in iter_parameter_specs(generator.model))
    expected = generate(tiny.model(config), [[5, 6, 7]], SEEDED)
    assert text(path) == expected


@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_mtp_layers_are_loaded_for_drafts(kind: str, tmp_path: Path, tiny: SimpleNamespace) -> None:
    latent = {"mla": MLAConfig(kv_rank=6, nope_dim=2, rope_dim=2, value_dim=4), "num_kv_heads": 6}
    config = tiny.config(vocab_size=300, mtp=MTPConfig(num_layers=1), **latent)
    path = save(tmp_path / "ours", tiny.model(config), TokenizerConfig())
    if kind == "folder":
        convert(open_pretrained(path), tmp_path / "theirs", "huggingface")
        path = tmp_path / "theirs"
    source = open_source(str(path), 1)
    speculation = SpeculationConfig(method="mtp")
    generator, plain = (
        load_text_generator(
            source,
            build_single_rank_mesh(),
            CPU,
            torch.float64,
            config=EngineConfig(speculation=settings),
        )
        for settings in (speculation, SpeculationConfig())
    )
    prompts = [[1, 2, 3], [9] * 20]
    engine = build_engine(generator, EngineConfig(speculation=speculation))
    outputs = run(engine, [(prompt, GREEDY) for prompt in prompts])
    expected = run(build_engine(plain, EngineConfig()), [(prompt, GREEDY) for prompt in prompts])
    assert [one.outputs[0].token_ids for one in outputs] == [
        one.outputs[0].token_ids for one in expected
    ]
    assert engine.scheduler.make_stats().num_drafts > 0
    assert len(engine.scheduler.make_stats().num_draft_tokens_per_pos) == 1
    for loaded, number, message in (
        (plain, None, "num_draft_tokens=1: the model has 0 MTP layers, or was loaded without them"),
        (generator, 2, "num_draft_tokens=2: the model has 1 MTP layers.* Set num_draft_tokens to"),
    ):
        settings = SpeculationConfig(method="mtp", num_draft_tokens=number)
        with pytest.raises(ConfigError, match=message):
            build_engine(loaded, EngineConfig(speculation=settings))


def load_with_draft(source: Path, draft_model: Path) -> TextGenerator:
    speculation = SpeculationConfig(method="draft_model", draft_model=str(draft_model))
    return load_text_generator(
        open_source(str(source), 1),
        build_single_rank_mesh(),
        CPU,
        torch.float32,
        config=EngineConfig(speculation=speculation),
    )


def test_draft_model_is_loaded_and_has_a_cache_of_its_own(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tokenizer = TokenizerConfig(kind="null", vocab_size=37)
    source = save(tmp_path / "a", tiny.model(tiny.config()), tokenizer)
    draft = save(tmp_path / "b", tiny.model(tiny.config(num_layers=1)), tokenizer)
    generator = load_with_draft(source, draft)
    config = EngineConfig(
        speculation=SpeculationConfig(method="draft_model", draft_model=str(draft))
    )
    engine = build_engine(generator, config)
    plain = build_engine(generator, EngineConfig())
    outputs = [run(each, [([1, 2, 3], GREEDY)])[0].outputs[0] for each in (engine, plain)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert engine.scheduler.make_stats().num_drafts > 0
    without = replace(generator, draft_model=None, draft_config=None)
    for loaded, message in (
        (without, "the model was loaded without it. Pass the same"),
        (generator, "speculation.method=draft_model needs speculation.draft_model. Set it to"),
    ):
        if loaded is generator:
            config = EngineConfig(speculation=SpeculationConfig(method="draft_model"))
        with pytest.raises(ConfigError, match=message):
            build_engine(loaded, config)
    config = EngineConfig(speculation=SpeculationConfig(method="ngram", draft_model="x"))
    with pytest.raises(ConfigError, match=r"draft_model=x with .*method=ngram, which uses no dra"):
        build_engine(generator, config)


def test_draft_model_with_another_vocabulary_is_rejected(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(vocab_size=300))
    source = save(tmp_path / "a", model, TokenizerConfig())
    numbers = save(tmp_path / "b", model, TokenizerConfig(kind="null", vocab_size=257))
    fewer = save(tmp_path / "c", model, TokenizerConfig(kind="null", vocab_size=200))
    with pytest.raises(ConfigError, match=r"/c/.*: its tokenizer has 200 tokens, .* has 257. Use"):
        load_with_draft(source, fewer)
    with pytest.raises(ConfigError, match=r"its token 0 is '.*', that of the model is '.*'. Use a"):
        load_with_draft(source, numbers)


@pytest.mark.parametrize(("experts", "ep"), [(6, 2), (5, 1)])
def test_whole_experts_are_divided_over_ranks_if_possible(
    experts: int, ep: int, tiny: SimpleNamespace
) -> None:
    model = tiny.config(moe=MoEConfig(num_experts=experts, top_k=2, ffn_hidden_size=5))
    layout = generation_layout(model, 2)
    assert (layout.tp, layout.ep, layout.etp, layout.sp) == (2, ep, 1 if ep > 1 else None, False)
    assert generation_layout(tiny.config(), 2) == ParallelConfig(tp=2, overlap=False)


def test_base_is_accepted_only_with_adapters(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)), TokenizerConfig())
    with pytest.raises(
        ConfigError, match=r"--base=x: .* holds a model, not adapters. Remove --base, or use"
    ):
        open_source(str(path), 1, base="x")


def test_generator_computes_in_the_requested_dtype(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)), TokenizerConfig())
    for dtype in (torch.bfloat16, torch.float64):
        generator = load_text_generator(
            open_source(str(path), 1), build_single_rank_mesh(), CPU, dtype
        )
        assert {parameter.dtype for parameter in generator.model.parameters()} == {dtype}
        assert len(text(path, dtype)) == 9


def test_texts_end_at_the_end_token_of_the_tokenizer_or_the_folder(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(vocab_size=300))
    ours = save(tmp_path / "a", model, TokenizerConfig())
    assert load_text_generator(
        open_source(str(ours), 1), build_single_rank_mesh(), CPU, torch.float32
    ).stops == {256}
    convert(open_pretrained(ours), tmp_path / "b", "huggingface")
    (tmp_path / "b" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    reference = load_text_generator(
        open_source(str(tmp_path / "b"), 1), build_single_rank_mesh(), CPU, torch.float32
    )
    assert reference.stops == {3, 4, 256} and reference.tokenizer.vocab_size == 300, (
        "no tokenizer came with it: ids"
    )
    words = train_bpe(["some text"] * 3, vocab_size=260, path=str(tmp_path / "words"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "b" / name).write_bytes((tmp_path / "words" / name).read_bytes())
    reference = load_text_generator(
        open_source(str(tmp_path / "b"), 1), build_single_rank_mesh(), CPU, torch.float32
    )
    assert reference.stops == {3, 4, 256, words.eod}
    (tmp_path / "b" / "generation_config.json").unlink()
    (tmp_path / "b" / "tokenizer.json").unlink()
    reference = load_text_generator(
        open_source(str(tmp_path / "b"), 1), build_single_rank_mesh(), CPU, torch.float32
    )
    assert reference.stops == {256}, "the last id has no meaning when nobody named it"
    convert(open_pretrained(tmp_path / "b"), tmp_path / "c", "megalith")
    kept = load_text_generator(
        open_source(str(tmp_path / "c"), 1), build_single_rank_mesh(), CPU, torch.float32
    )
    assert kept.stops == {256}, "nor in a checkpoint that was made from the folder"
    numbers = save(tmp_path / "d", model, TokenizerConfig(kind="null", vocab_size=300))
    assert load_text_generator(
        open_source(str(numbers), 1), build_single_rank_mesh(), CPU, torch.float32
    ).stops == {299}


def test_tokenizer_without_an_end_token_can_generate(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_bpe(["some text"] * 3, vocab_size=260, path=str(tmp_path / "words"))
    document = json.loads((tmp_path / "words" / "tokenizer.json").read_text())
    document["added_tokens"] = []
    document["model"]["vocab"] = {
        k: v for k, v in document["model"]["vocab"].items() if k != "<|endoftext|>"
    }
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(document))
    words = TokenizerConfig(kind="huggingface", path=str(tmp_path / "words"))
    path = save(tmp_path / "a", tiny.model(tiny.config(vocab_size=300)), words)
    assert (
        load_text_generator(
            open_source(str(path), 1), build_single_rank_mesh(), CPU, torch.float32
        ).stops
        == frozenset()
    )


def test_a_tokenizer_with_more_tokens_than_the_model_is_rejected(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=256)), TokenizerConfig())
    with pytest.raises(
        DataError,
        match="the tokenizer has 257 tokens, but the model has only 256. Use the tokenizer that",
    ):
        load_text_generator(open_source(str(path), 1), build_single_rank_mesh(), CPU, torch.float32)


@pytest.mark.parametrize("tp", [4, 7])
def test_processes_that_do_not_fit_its_heads_are_rejected_with_those_that_do(
    tp: int, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(
        tmp_path, tiny.model(tiny.config(vocab_size=300, num_kv_heads=3)), TokenizerConfig()
    )
    with pytest.raises(
        ConfigError, match=rf"--nproc={tp}: .* model.num_kv_heads=3.*--nproc to one of 1, 2, 3"
    ) as raised:
        open_source(str(path), tp)
    assert "parallel" not in str(raised.value)


def test_a_bidirectional_model_cannot_generate(tmp_path: Path, tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(attention=AttentionConfig(causal=False)))
    path = save(tmp_path, model, TokenizerConfig())
    with pytest.raises(
        ConfigError, match="model.attention.causal=false: its tokens attend to later"
    ):
        open_source(str(path), 1)


def test_rejected_process_counts_report_the_layout_problem(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=5, biases=True)
    path = save(
        tmp_path,
        tiny.model(tiny.config(vocab_size=300, num_kv_heads=6, moe=moe)),
        TokenizerConfig(),
    )
    with pytest.raises(ConfigError) as raised:
        open_source(str(path), 3)
    assert str(raised.value).endswith(
        ": model.moe.biases=true: an expert's output bias would be added by every rank that has a "
        "part of the expert. Set --nproc to one of 1, 2, 4."
    )
    narrow = save(
        tmp_path / "narrow",
        tiny.model(tiny.config(vocab_size=300, ffn_hidden_size=3)),
        TokenizerConfig(),
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot share [^:]+: --nproc=4 is more than model.ffn_hidden_size=3 or .* one of 1, "
        r"2\.$",
    ):
        open_source(str(narrow), 4)


def test_generation_accepts_untrainable_router_settings(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    moe = MoEConfig(num_experts=3, top_k=1, ffn_hidden_size=5)
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300, moe=moe)), TokenizerConfig())
    assert len(text(path)) == 9


def load_with_nvls(rank: int, world: int, path: str) -> str:
    parallel = InferenceParallelConfig(collectives="nvls")
    source = open_source(path, world, parallel=parallel)
    mesh = build_generation_mesh(source.model, parallel, rank=rank, world=world)
    with pytest.raises(ConfigError) as excinfo:
        load_text_generator(source, mesh, CPU, torch.float32, parallel=parallel)
    return str(excinfo.value)


def test_nvls_is_rejected_on_cpus(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tokenizer = TokenizerConfig(kind="null", vocab_size=37)
    path = save(tmp_path, tiny.model(tiny.config()), tokenizer)
    (text,) = set(run_ranks(load_with_nvls, 2, str(path)))
    assert text == (
        "parallel.collectives=nvls is not available to ranks [0, 1]: rank 0 computes on cpu, and "
        "NVLS needs NVIDIA GPUs. Set parallel.collectives to auto or process_group."
    )
