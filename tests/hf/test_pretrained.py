import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import TokenizerConfig
from megalith.config.model import DropoutConfig, ModelConfig, RopeConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml
from megalith.data.huggingface import train_bpe
from megalith.errors import CheckpointError, DataError
from megalith.hf import pretrained
from megalith.hf.convert import convert
from megalith.hf.families import QWEN2
from megalith.hf.pretrained import (
    CheckpointWeights,
    find_export_family,
    load_pretrained,
    load_weights_with_records,
    locate_source,
    open_pretrained,
)
from megalith.hf.release import release_run
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

BYTES = TokenizerConfig()

BY_CHANCE = RouterConfig(force_load_balancing=True)
HOW = "model.moe.router.force_load_balancing=true"
FORCED_BALANCING_WARNING = (
    f"its experts were selected at random during training ({HOW}): use it only to measure speed"
)


def save(
    folder: Path,
    step: int,
    entries: list[CheckpointEntry],
    config: ModelConfig,
    tokenizer: TokenizerConfig = BYTES,
) -> Path:
    """A checkpoint of a run."""
    text = dump_yaml(release_run("tiny", config, tokenizer, folder))
    return save_checkpoint(
        folder, step, entries, {"step": step}, single_rank_group("world"), config_text=text
    ).path


def test_a_run_a_checkpoint_and_a_model_folder_are_found(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "first"
    entries = tiny.entries(tiny.model(tiny.config()))
    old, new = (save(run / "checkpoints", step, entries, tiny.config()) for step in (9, 10))
    tiny.folder(tmp_path / "theirs", tiny.config())
    assert locate_source(str(run)) == locate_source(str(run / "checkpoints")) == new
    assert locate_source(str(old)) == old
    assert locate_source(str(tmp_path / "theirs")) == tmp_path / "theirs"
    monkeypatch.chdir(tmp_path)
    assert locate_source("first") == Path("runs/first/checkpoints/step_0000010")


def test_a_source_without_a_model_is_rejected_with_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match="quikstart: no such folder.* Did you mean quickstart?"
    ):
        locate_source("quikstart")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors is a file\. Pass the folder of .*, such as \. if it",
    ):
        locate_source("model.safetensors")
    with pytest.raises(
        CheckpointError, match="zzz: no such folder.*Pass the folder of a run, checkpoint or model"
    ):
        locate_source("zzz")
    (tmp_path / "runs" / "quickstart" / "config.yaml").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"has no checkpoint \(found: config.yaml\). Use the folder of a run that",
    ):
        locate_source("quickstart")


def test_open_pretrained_reads_all_records_of_a_checkpoint(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(tmp_path, 3, tiny.entries(tiny.model(tiny.config())), tiny.config())
    opened = open_pretrained(path)
    assert (opened.model, opened.tokenizer, opened.token_ids) == (tiny.config(), BYTES, {})
    assert (
        opened.checkpoint is not None
        and opened.stop_ids() == frozenset()
        and opened.auxiliary_files() == {}
    )


def test_open_pretrained_reads_all_records_of_a_hugging_face_folder(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config(), extra={"eos_token_id": 7})
    opened = open_pretrained(tmp_path / "x")
    assert (
        opened.checkpoint is None
        and replace(opened.model, pad_vocab_to_multiple_of=8) == tiny.config()
    )
    assert opened.tokenizer == TokenizerConfig(kind="null", vocab_size=37)
    assert opened.stop_ids() == {7} and list(opened.auxiliary_files()) == ["generation_config.json"]
    (tmp_path / "x" / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert opened.stop_ids() == {7, 8, 9}
    (tmp_path / "x" / "tokenizer.json").write_text("{}")
    assert open_pretrained(tmp_path / "x").tokenizer.path == str(tmp_path / "x")


def test_files_of_a_runs_tokenizer_are_included(tmp_path: Path, tiny: SimpleNamespace) -> None:
    train_bpe(["some text, some more"] * 3, vocab_size=258, path=str(tmp_path / "words"))
    tokenizer = TokenizerConfig(kind="huggingface", path=str(tmp_path / "words"))
    path = save(
        tmp_path / "a", 1, tiny.entries(tiny.model(tiny.config())), tiny.config(), tokenizer
    )
    assert open_pretrained(path).auxiliary_files().keys() == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    (path / "tokenizer.json").write_text("{}")
    opened = open_pretrained(path)
    assert opened.tokenizer.path == str(path), "a checkpoint that brings its tokenizer may be moved"
    assert opened.auxiliary_files().keys() == {"tokenizer.json"}
    (path / "tokenizer.json").unlink()
    (tmp_path / "words" / "tokenizer.json").unlink()
    assert open_pretrained(path).model == tiny.config(), "weights can be loaded without it"
    with pytest.raises(DataError, match="the folder has no tokenizer.json"):
        open_pretrained(path).auxiliary_files()


def test_settings_that_are_not_of_a_model_are_rejected(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    entries = tiny.entries(tiny.model(tiny.config()))
    for step, text in enumerate(["name: x\n", "- 1\n", "model: {hidden: 3}\n", "a: [\n"], 1):
        path = save_checkpoint(
            tmp_path, step, entries, {}, single_rank_group("world"), config_text=text
        ).path
        with pytest.raises(
            CheckpointError,
            match=r"(?s)config.yaml does not describe a model.*Use a checkpoint that",
        ):
            open_pretrained(path)


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_layout_loads_weights_from_either_kind(
    kind: str, tp: int, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = tiny.config(num_kv_heads=3, qkv_bias=True, output_bias=True)
    model = tiny.folder(tmp_path / "folder", config)
    save(tmp_path / "checkpoint", 5, tiny.entries(model), config)
    grid = model_grid(ParallelConfig(tp=tp), config, tp)
    for rank in range(tp):
        part = tiny.blank(config, build_meta_mesh(grid, rank=rank))
        assert (
            load_pretrained(
                tiny.entries(part), str(tmp_path / kind), single_rank_group("world"), model=config
            )
            == []
        )
        for entry in tiny.entries(part):
            box = tuple(slice(a, b) for a, b in entry.shard.box)
            assert torch.equal(
                entry.tensor.view(entry.shard.box_shape), tiny.tensors(model)[entry.shard.name][box]
            )


def in_bf16(entry: CheckpointEntry, scale: float = 1.0) -> CheckpointEntry:
    """The entry of a weight that is stored in bf16."""
    tensor = (scale * entry.tensor.detach()).bfloat16()
    return replace(entry, shard=replace(entry.shard, dtype="bf16"), tensor=tensor)


def with_master_weights(
    tiny: SimpleNamespace, model: Any, scale: float = 1.0
) -> list[CheckpointEntry]:
    """bf16 weights and fp32 master weights of a model."""
    weights = tiny.entries(model)
    low = [in_bf16(entry, scale) for entry in weights]
    return low + [
        replace(entry, role="master", tensor=scale * entry.tensor.detach()) for entry in weights
    ]


def test_master_weights_are_loaded_in_the_source_dtype(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = tiny.config()
    model = tiny.folder(tmp_path / "theirs", config)
    save(tmp_path / "ours", 1, with_master_weights(tiny, model), config)
    save(
        tmp_path / "short", 1, with_master_weights(tiny, model)[: len(tiny.entries(model))], config
    )
    for source, exact in (("theirs", True), ("ours", True), ("short", False)):
        wanted = with_master_weights(tiny, model, scale=0.0)
        load_pretrained(wanted, str(tmp_path / source), single_rank_group("world"), model=config)
        for entry in wanted:
            full = tiny.tensors(model)[entry.shard.name].flatten()
            expected = full if entry.role == "master" and exact else full.bfloat16()
            assert torch.equal(entry.tensor.flatten(), expected.to(entry.tensor.dtype)), (
                source,
                entry.key,
            )


def test_weights_in_fp32_are_read_from_master_weights(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config())
    path = save(tmp_path, 1, with_master_weights(tiny, model), tiny.config())
    opened = open_pretrained(path)
    assert isinstance(opened.weights, CheckpointWeights)
    down = tiny.tensors(model)["layers.0.mlp.down"]
    box = Shard.full("x", tuple(down.shape)).box
    assert opened.weights.dtype("layers.0.mlp.down") == torch.bfloat16
    assert torch.equal(opened.weights.read("layers.0.mlp.down", box, torch.float32), down)
    assert torch.equal(
        opened.weights.read("layers.0.mlp.down", box, torch.bfloat16), down.bfloat16()
    )


def test_load_pretrained_loads_only_weights(tmp_path: Path, tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    moments = [
        replace(entry, role="exp_avg", tensor=entry.tensor.detach())
        for entry in tiny.entries(model)
    ]
    save(tmp_path, 1, [*tiny.entries(model), *moments], tiny.config())
    back = tiny.blank(tiny.config())
    load_pretrained(
        tiny.entries(back), str(tmp_path), single_rank_group("world"), model=tiny.config()
    )
    assert torch.equal(tiny.tensors(back)["norm.weight"], tiny.tensors(model)["norm.weight"])


def test_training_settings_may_differ_and_the_context_may_grow(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.folder(tmp_path / "x", tiny.config())
    dropout = DropoutConfig(residual=0.1)
    changed = tiny.config(
        init_std=0.1,
        init="xavier_uniform",
        embedding_init_std=0.5,
        fp32_residual=True,
        max_seq_len=64,
        pad_vocab_to_multiple_of=16,
        dropout=dropout,
    )
    notes = load_pretrained(
        tiny.entries(tiny.blank(changed)),
        str(tmp_path / "x"),
        single_rank_group("world"),
        model=changed,
    )
    assert notes == ["model.max_seq_len: 32 in the checkpoint, 64 in this run"]
    save(
        tmp_path / "y", 1, tiny.entries(model), tiny.config(head_dim=2, rope=RopeConfig(factor=3.0))
    )
    entries = tiny.entries(tiny.blank(tiny.config()))
    assert (
        load_pretrained(
            entries, str(tmp_path / "y"), single_rank_group("world"), model=tiny.config()
        )
        == []
    )


@pytest.mark.parametrize(("there", "here"), [(8, 1), (1, 8), (8, 64), (64, 8)])
def test_a_vocabulary_may_be_padded_to_another_multiple_than_in_a_checkpoint(
    there: int, here: int, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    before, after = (tiny.config(pad_vocab_to_multiple_of=multiple) for multiple in (there, here))
    model, back = tiny.model(before), tiny.blank(after)
    save(tmp_path, 1, tiny.entries(model), before)
    assert load_weights_with_records(
        tiny.entries(back), str(tmp_path), single_rank_group("world"), model=after
    ) == (
        [],
        (),
        None,
    )
    reference, ours = tiny.tensors(model), tiny.tensors(back)
    for name in ours:
        known = 37 if name in ("embed.weight", "head.weight") else len(ours[name])
        assert (
            torch.equal(ours[name][:known], reference[name][:known])
            and not ours[name][known:].any()
        ), name
    with pytest.raises(
        CheckpointError, match=rf"model.pad_vocab_to_multiple_of +{there} +{here}\n"
    ):
        load_pretrained(tiny.entries(back), str(tmp_path), single_rank_group("world"), model=after)
    other = replace(after, vocab_size=100)
    rules = CheckpointConfig(
        allow_model_changes=("model.vocab_size", "model.pad_vocab_to_multiple_of")
    )
    with pytest.raises(
        CheckpointError, match=r"embed.weight is \[1\d\d, 12\] in this run and \[\d\d, 12\] in the"
    ):
        load_weights_with_records(
            tiny.entries(tiny.blank(other)),
            str(tmp_path),
            single_rank_group("world"),
            model=other,
            rules=rules,
        )


def test_master_weights_of_a_padded_vocabulary_match_its_weights(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = tiny.config(pad_vocab_to_multiple_of=1), tiny.config(pad_vocab_to_multiple_of=8)
    entries = tiny.entries(tiny.model(before))
    narrow = [in_bf16(entry) for entry in entries]
    save(tmp_path, 1, [*narrow, *(replace(entry, role="master") for entry in entries)], before)
    low = tiny.entries(tiny.blank(after, dtype=torch.bfloat16))
    wide = [
        replace(entry, role="master", tensor=torch.full(entry.tensor.shape, 9.0)) for entry in low
    ]
    load_weights_with_records([*low, *wide], str(tmp_path), single_rank_group("world"), model=after)
    tables = [
        entry.tensor.detach().view(-1, 12)
        for entry in (*low, *wide)
        if entry.shard.name == "embed.weight"
    ]
    for table in tables:
        exact = tiny.tensors(tiny.model(before))["embed.weight"].to(table.dtype)
        assert torch.equal(table[:37], exact) and not table[37:].any()
    assert len(tables) == 2 and "rounded" not in caplog.text, caplog.text


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_changed_computation_is_rejected_with_a_table_unless_allowed(
    kind: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    save(
        tmp_path / "checkpoint",
        1,
        tiny.entries(tiny.folder(tmp_path / "folder", tiny.config())),
        tiny.config(),
    )
    changed = tiny.config(
        rope=RopeConfig(theta=5e5), norm_eps=1e-6, logit_scale=2.0, max_seq_len=16
    )
    target = tiny.entries(tiny.blank(changed))

    def load(*allow: str) -> list[str]:
        rules = CheckpointConfig(allow_model_changes=allow)
        return load_pretrained(
            target, str(tmp_path / kind), single_rank_group("world"), model=changed, rules=rules
        )

    with pytest.raises(CheckpointError) as excinfo:
        load("model.norm")
    assert (
        " has a different model:\n"
        "  field              checkpoint  yours\n"
        "  model.max_seq_len  32          16\n"
        "  model.norm_eps     1e-05       1e-06\n"
        "  model.rope.theta   10000.0     500000.0\n"
        "  model.logit_scale  1.0         2.0\n"
        "To load it, set model.* to its values. To change what these weights compute, set "
        "checkpoint.allow_model_changes to model.max_seq_len model.norm_eps model.rope.theta "
        "model.logit_scale."
    ) in str(excinfo.value)
    assert all((entry.tensor == -7).all() for entry in target), "nothing was loaded"
    notes = load("model.rope", "model.norm_eps", "model.logit_scale", "model.max_seq_len")
    assert [note.partition(":")[0] for note in notes] == [
        "model.max_seq_len",
        "model.norm_eps",
        "model.rope.theta",
        "model.logit_scale",
    ]
    assert not any((entry.tensor == -7).all() for entry in target)


def test_derived_settings_are_not_listed_as_differences(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    save(tmp_path, 1, tiny.entries(tiny.model(tiny.config())), tiny.config())
    wider = tiny.config(hidden_size=24)
    with pytest.raises(
        CheckpointError, match="set checkpoint.allow_model_changes to model.hidden_size[.]"
    ):
        load_pretrained(
            tiny.entries(tiny.blank(wider)), str(tmp_path), single_rank_group("world"), model=wider
        )


def test_learned_positions_cannot_grow(tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = tiny.config(positions="learned")
    save(tmp_path, 1, tiny.entries(tiny.model(config)), config)
    longer = replace(config, max_seq_len=64)
    with pytest.raises(CheckpointError, match=r"model.max_seq_len  32          64"):
        load_pretrained(
            tiny.entries(tiny.blank(longer)),
            str(tmp_path),
            single_rank_group("world"),
            model=longer,
        )


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_a_model_with_additional_biases_loads_the_other_weights(
    kind: str, tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    save(
        tmp_path / "checkpoint",
        1,
        tiny.entries(tiny.folder(tmp_path / "folder", tiny.config())),
        tiny.config(),
    )
    biased = tiny.config(mlp_bias=True)
    target = tiny.blank(biased)

    def load(**rules: Any) -> None:
        settings = CheckpointConfig(allow_model_changes=("model.mlp_bias",), **rules)
        load_pretrained(
            tiny.entries(target),
            str(tmp_path / kind),
            single_rank_group("world"),
            model=biased,
            rules=settings,
        )

    with pytest.raises(
        CheckpointError, match=r"only in this run: model.layers.\*.mlp.gate_up_bias \(\* = 0, 1\)"
    ):
        load()
    load(missing_keys="warn", skip=("norm.weight",))
    kept = {name for name, tensor in tiny.tensors(target).items() if (tensor == -7).all()}
    names = {
        f"layers.{layer}.mlp.{bias}" for layer in (0, 1) for bias in ("gate_up_bias", "down_bias")
    }
    assert kept == names | {"norm.weight"}
    assert (
        "lacks model.layers.*.mlp.down_bias (* = 0, 1); model.layers.*.mlp.gate_up_bias"
        in caplog.text
    )
    # 2 (2 * 10 + 12) + 12
    assert "5 tensors (76 parameters) kept their initial values: " in caplog.text


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_a_model_with_another_vocabulary_loads_the_layers(
    kind: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    save(
        tmp_path / "checkpoint",
        1,
        tiny.entries(tiny.folder(tmp_path / "folder", tiny.config())),
        tiny.config(),
    )
    other = tiny.config(vocab_size=61)
    target = tiny.blank(other)
    rules = CheckpointConfig(skip=("head.*", "embed.*"), allow_model_changes=("model.vocab_size",))
    load_pretrained(
        tiny.entries(target),
        str(tmp_path / kind),
        single_rank_group("world"),
        model=other,
        rules=rules,
    )
    kept = {name for name, tensor in tiny.tensors(target).items() if (tensor == -7).all()}
    assert kept == {"embed.weight", "head.weight"}


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_another_model_is_rejected_with_all_differences(
    kind: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.folder(tmp_path / "folder", tiny.config())
    save(tmp_path / "checkpoint", 1, tiny.entries(model), tiny.config())
    other = tiny.config(tied_embeddings=True, num_layers=3, vocab_size=38)
    with pytest.raises(CheckpointError, match="has a different model") as excinfo:
        load_pretrained(
            tiny.entries(tiny.blank(other)),
            str(tmp_path / kind),
            single_rank_group("world"),
            model=other,
        )
    for line in (
        "model.tied_embeddings  False       True",
        "model.num_layers       2           3",
        "model.vocab_size       37          38",
        "set model.* to its values",
    ):
        assert line in str(excinfo.value)


def test_a_run_is_found_by_rank_0_alone(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.folder(tmp_path / "x", tiny.config())
    requested: list[str] = []

    def counted(source: str) -> Path:
        requested.append(source)
        return locate_source(source)

    monkeypatch.setattr(pretrained, "locate_source", counted)
    load_pretrained(
        tiny.entries(model), str(tmp_path / "x"), single_rank_group("world"), model=tiny.config()
    )
    assert requested == [str(tmp_path / "x")]


# --- generation_config.json


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id='x': expected token ids from 0 to 36"),
        ({"eos_token_id": [3, 37]}, r"eos_token_id=\[3, 37\]: expected token ids"),
        ({"eos_token_id": -1}, "eos_token_id=-1: expected token ids"),
        ({"eos_token_id": True}, "eos_token_id=True: expected token ids"),
        ({"temperature": -1}, "temperature=-1: expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan: expected a number"),
        ({"temperature": "hot"}, "temperature='hot': expected a number"),
        ({"top_p": 1.5}, "top_p=1.5: expected a number from 0.0 to 1.0"),
        ({"top_k": 2.5}, "top_k=2.5: expected a whole number of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number of at least 1"),
        ({"do_sample": "yes"}, "do_sample='yes': expected true or false"),
    ],
)
def test_invalid_generation_settings_are_rejected(
    fields: dict[str, Any], message: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    file = tmp_path / "x" / "generation_config.json"
    file.write_text(json.dumps(fields))
    opened = open_pretrained(tmp_path / "x")
    for use in (opened.stop_ids, opened.auxiliary_files):
        with pytest.raises(
            CheckpointError,
            match=rf"generation_config.json: {message}.*Correct the file, or remove it",
        ):
            use()
    file.write_text(
        json.dumps(
            {"eos_token_id": [3, 36], "temperature": 0.6, "top_p": None, "do_sample": False, "x": 1}
        )
    )
    assert opened.stop_ids() == {3, 36}
    file.write_text("[]")
    with pytest.raises(
        CheckpointError, match=r"generation_config.json holds list; expected an object"
    ):
        opened.auxiliary_files()


# --- the family


def test_a_run_keeps_the_family_of_the_weights_it_started_from(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = replace(tiny_run().model, qkv_bias=True, pad_vocab_to_multiple_of=1)
    tiny.folder(tmp_path / "base", config, family=QWEN2)
    load = {
        "train.steps": "1",
        "train.eval_steps": "0",
        "train.eval_every": "none",
        "model.qkv_bias": "true",
    }
    for folder, settings in {
        "run": {"checkpoint.load": str(tmp_path / "base")},
        "later": {
            "checkpoint.load": str(tmp_path / "run"),
            "checkpoint.load_mode": "progress",
            "train.steps": "2",
        },
        "adapters": {"checkpoint.load": str(tmp_path / "run"), "lora.rank": "2"},
    }.items():
        opened = open_pretrained(
            locate_source(str(trained(tiny_run(load | settings), tmp_path / folder)))
        )
        assert find_export_family(opened) is QWEN2, folder
    resumed = trained(
        tiny_run(load | {"checkpoint.load": str(tmp_path / "base"), "train.steps": "2"}),
        tmp_path / "run",
    )
    assert find_export_family(open_pretrained(locate_source(str(resumed)))) is QWEN2
    assert open_checkpoint(locate_source(str(resumed))).step == 2


# --- chance chose experts


def mixture_run(router: RouterConfig, steps: int, **settings: str) -> TrainRun:
    """The tiny run with experts."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    run = tiny_run(
        {"train.steps": str(steps), "train.eval_steps": "1", "observe.plots": "false"} | given
    )
    return replace(
        run,
        model=replace(run.model, moe=MoEConfig(num_experts=4, ffn_hidden_size=6, router=router)),
    )


def trained(run: TrainRun, path: Path) -> Path:
    """Its folder, trained in this process."""
    run_training(run, RunFolder(path), build_single_rank_mesh(), torch.device("cpu"), show=False)
    return path


def test_forced_load_balancing_is_reported_when_the_checkpoint_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(mixture_run(BY_CHANCE, 2), tmp_path / "run")
    step = locate_source(str(run))
    assert open_checkpoint(step).state["forced_choices"] == [HOW]
    capsys.readouterr()
    for words in (
        ["evaluate", str(run), "--samples", "2"],
        ["generate", str(run), "a", "--max-new-tokens", "1"],
        ["convert", str(run), str(tmp_path / "theirs"), "--dry-run", "--to", "megalith"],
        [
            "chat",
            str(run),
            "--template",
            "identity",
            "--max-new-tokens",
            "1",
            "--input",
            str(tmp_path / "none.txt"),
        ],
    ):
        (tmp_path / "none.txt").write_text("")
        assert main(words) == 0, words
        warnings = [
            line
            for line in capsys.readouterr().err.splitlines()
            if FORCED_BALANCING_WARNING in line
        ]
        assert warnings == [
            f"{run if words[0] == 'evaluate' else step}: {FORCED_BALANCING_WARNING}"
        ], words


def test_forced_load_balancing_is_reported_for_derived_checkpoints(tmp_path: Path) -> None:
    run = trained(mixture_run(BY_CHANCE, 1), tmp_path / "run")
    convert(open_pretrained(locate_source(str(run))), tmp_path / "copy", "megalith")
    assert open_pretrained(tmp_path / "copy").warnings() == [FORCED_BALANCING_WARNING]
    for steps in (1, 2):  # begins with its weights, and goes on
        later = mixture_run(RouterConfig(), steps, checkpoint__load=str(tmp_path / "copy"))
        result = open_pretrained(locate_source(str(trained(later, tmp_path / "later"))))
        assert (
            result.warnings() == [FORCED_BALANCING_WARNING]
            and result.path.name == f"step_000000{steps}"
        )
    learned = trained(mixture_run(RouterConfig(), 1), tmp_path / "learned")
    assert open_pretrained(locate_source(str(learned))).warnings() == []
    assert "forced_choices" not in open_checkpoint(locate_source(str(learned))).state


def test_adapters_report_forced_load_balancing_of_their_initial_adapters(tmp_path: Path) -> None:
    base = trained(mixture_run(RouterConfig(), 1), tmp_path / "base")
    beside = {"checkpoint__load": str(base), "lora__rank": "2"}
    first = trained(mixture_run(BY_CHANCE, 1, **beside), tmp_path / "first")
    later = trained(
        mixture_run(RouterConfig(), 1, lora__load=str(first), **beside), tmp_path / "later"
    )
    assert open_checkpoint(locate_source(str(later))).state["forced_choices"] == [HOW]
    assert open_pretrained(locate_source(str(later))).warnings() == [FORCED_BALANCING_WARNING]
