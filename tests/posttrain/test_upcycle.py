"""A mixture made of a dense model begins as the dense model: exactly where that can be, and nearly
where it cannot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.data import TokenizerConfig
from megalith.config.model import LayersConfig, ModelConfig, MTPConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.tree import dump_yaml
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.pretrained import Pretrained, open_pretrained
from megalith.hf.release import release_run
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.posttrain.upcycle import (
    compute_factors,
    expected_weight,
    locate_in_dense,
    upcycle,
    upcycle_problems,
)
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.objective import sum_lm_losses
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")
DENSE = ModelConfig(
    vocab_size=61,
    hidden_size=12,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    ffn_hidden_size=20,
    max_seq_len=32,
    pad_vocab_to_multiple_of=1,
    init_std=0.3,
)
IDS = torch.arange(23) * 7 % 61
WHOLE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=20)
HALVES = MoEConfig(num_experts=6, top_k=4, ffn_hidden_size=10)


def entries_of(model: Decoder) -> list[CheckpointEntry]:
    return [
        CheckpointEntry(one.shard, "param", getattr(module, name))
        for one, module, name in iter_parameter_specs(model)
    ]


def dense(path: Path, **changes: Any) -> Path:
    """A checkpoint with random weights, biases among them."""
    config = replace(DENSE, **changes)
    model = Decoder(build_context(config, build_single_rank_mesh()))
    allocate(model, CPU)
    initialize(model, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    text = dump_yaml(
        release_run("dense", config, TokenizerConfig(kind="null", vocab_size=61), path)
    )
    save_checkpoint(path, 1, entries_of(model), {}, single_rank_group("world"), config_text=text)
    return next(path.glob("step_*"))


def loaded(source: Pretrained) -> Decoder:
    """In float64, of the fp32 weights."""
    model = Decoder(build_context(source.model, build_single_rank_mesh(), dtype=torch.float64))
    allocate(model, CPU)
    with torch.no_grad():
        for entry in entries_of(model):
            values = source.weights.read(entry.shard.name, entry.shard.box, torch.float32)
            entry.tensor.copy_(values.reshape(entry.tensor.shape))
    return model


def logits(path: Path, moe: MoEConfig | None = None, **options: Any) -> Tensor:
    """Of the model in a folder, or of the mixture that is made of it; in float64, of the fp32
    weights."""
    source = open_pretrained(path)
    source = source if moe is None else upcycle(source, moe, **options)
    model = loaded(source)
    with torch.no_grad():
        return model.head.logits(
            model.hidden_states(IDS, LayerInputs(seq_params_from_lengths([9, 14])))
        )


def off(theirs: Tensor, ours: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((theirs - ours).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    "moe",
    [
        WHOLE,
        replace(WHOLE, layers=(False, True, True)),
        replace(WHOLE, shared_ffn_hidden_size=7, shared_gate=True),
        replace(
            WHOLE,
            router=RouterConfig(
                score="sigmoid",
                expert_bias=True,
                routed_scaling_factor=2.5,
                num_groups=2,
                topk_groups=2,
            ),
        ),
    ],
)
def test_experts_copied_from_whole_mlps_match_the_dense_model(
    moe: MoEConfig, tmp_path: Path
) -> None:
    path = dense(tmp_path, activation="squared_relu", gated=False)
    assert off(logits(path), logits(path, moe)) < 1e-6
    assert (
        off(logits(path), logits(path, replace(moe, router=replace(moe.router, bias=True)))) < 1e-6
    )


def test_whole_mlps_are_exact_for_gates_and_biases_too(tmp_path: Path) -> None:
    path = dense(tmp_path, mlp_bias=True)
    assert off(logits(path), logits(path, replace(WHOLE, biases=True))) < 1e-6


def test_parts_of_an_mlp_are_exact_for_squared_relu_and_near_for_swiglu(tmp_path: Path) -> None:
    squared = dense(tmp_path / "squared", activation="squared_relu", gated=False, mlp_bias=True)
    assert off(logits(squared), logits(squared, replace(HALVES, biases=True))) < 1e-6
    swiglu = dense(tmp_path / "swiglu")
    gated = dense(tmp_path / "gated", activation="squared_relu")
    assert off(logits(gated), logits(gated, HALVES)) < 1e-6
    near = off(logits(swiglu), logits(swiglu, HALVES))
    print(f"\nSwiGLU, two experts for each MLP: logits off by {near:.1%} of the largest")
    assert 1e-4 < near < 0.3


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_factor_behind_the_activation_is_exact_for_all(activation: Any, tmp_path: Path) -> None:
    path = dense(tmp_path, activation=activation, gated=activation == "silu")
    assert off(logits(path), logits(path, HALVES, scale="down")) < 1e-6


def test_scores_that_are_not_normalized_are_compensated_on_average(tmp_path: Path) -> None:
    # a router that knows nothing is the average
    path = dense(tmp_path, init_overrides=(("*.router", 0.0),))
    bare = replace(WHOLE, router=RouterConfig(norm_topk_prob=False))
    single = replace(
        WHOLE, router=RouterConfig(score="sigmoid", norm_topk_prob=False, routed_scaling_factor=3.0)
    )
    root = replace(WHOLE, router=RouterConfig(score="sqrt_softplus", norm_topk_prob=False))
    assert (expected_weight(bare), expected_weight(single)) == (0.5, 3.0)
    assert compute_factors(DENSE, bare, 1, "spread").down == pytest.approx(2 ** (1 / 3))
    assert compute_factors(
        replace(DENSE, gated=False, activation="gelu"), bare, 1, "spread"
    ).up == pytest.approx(2**0.5)
    for moe in (bare, single, root):
        assert off(logits(path), logits(path, moe, scale="down")) < 1e-6


def test_expert_is_a_slice_of_inner_features_with_a_repeated_router(tmp_path: Path) -> None:
    source = open_pretrained(dense(tmp_path))
    built = upcycle(source, HALVES, scale="down").weights
    whole = source.weights.read("layers.1.mlp.down", ((0, 12), (0, 20)), torch.float32)
    for expert, columns in {
        0: slice(0, 10),
        1: slice(10, 20),
        2: slice(0, 10),
        5: slice(10, 20),
    }.items():
        box = (expert, expert + 1), (3, 9), (2, 7)
        result = built.read("layers.1.moe.experts.down", box, torch.float32)
        assert torch.equal(result[0], 2 * whole[3:9, columns][:, 2:7])
    router = built.read("layers.1.moe.router", ((0, 6), (0, 12)), torch.float32)
    assert torch.equal(router[0::2], router[1::2]) and not torch.equal(router[0], router[2])
    assert torch.equal(
        built.read("layers.1.moe.router", ((3, 5), (4, 9)), torch.float32), router[3:5, 4:9]
    )
    assert not torch.equal(
        built.read("layers.0.moe.router", ((0, 6), (0, 12)), torch.float32), router
    )
    assert locate_in_dense("down_bias", ((0, 12),), part=1, width=10) == ((0, 12),)


def losses_of_depths(path: Path, moe: MoEConfig | None = None) -> Tensor:
    """Losses of the next token and of the MTP layer, in float64."""
    source = open_pretrained(path)
    source = source if moe is None else upcycle(source, moe)
    model = loaded(source)
    ids, labels = IDS, IDS.roll(-1)
    with torch.no_grad():
        result = sum_lm_losses(
            model.outputs(
                ids,
                LayerInputs(seq_params_from_lengths([23])),
                mtp_inputs=((ids.roll(-1), labels.roll(-1)),),
            ),
            labels,
            ((ids.roll(-1), labels.roll(-1)),),
        )
    return torch.stack([loss.sum() for loss in result])


@pytest.mark.parametrize("layers", [(), (True, True, False)])
def test_mtp_layers_are_upcycled_like_the_last_layer(
    layers: tuple[bool, ...], tmp_path: Path
) -> None:
    path, moe = dense(tmp_path, mtp=MTPConfig(num_layers=1)), replace(WHOLE, layers=layers)
    expected, result = losses_of_depths(path), losses_of_depths(path, moe)
    assert len(result) == 2 and bool(result.all()) and off(expected, result) < 1e-6
    built = upcycle(open_pretrained(path), moe)
    names = {
        one.shard.name
        for one, _, _ in iter_parameter_specs(
            Decoder(build_context(built.model, build_single_rank_mesh()))
        )
    }
    assert ("mtp.0.layer.moe.experts.down" in names) == (not layers)


def test_seed_determines_only_the_initial_router_weights(tmp_path: Path) -> None:
    source = open_pretrained(dense(tmp_path))
    first, second = (upcycle(source, WHOLE, seed=seed).weights for seed in (0, 1))

    def differ(name: str, *shape: int) -> bool:
        box = tuple((0, size) for size in shape)
        return not torch.equal(
            *(weights.read(name, box, torch.float32) for weights in (first, second))
        )

    assert differ("layers.0.moe.router", 4, 12) and not differ(
        "layers.0.moe.experts.down", 4, 12, 20
    )


def test_upcycle_command_writes_a_checkpoint_that_a_run_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target, file = dense(tmp_path / "dense"), tmp_path / "mixture", tmp_path / "moe.yaml"
    file.write_text(
        "num_experts: 4\ntop_k: 2\nffn_hidden_size: 10\naux_loss: {batch_coeff: 0.01}\n"
    )
    assert main(["convert", str(path), str(target), "--upcycle", str(file), "--dry-run"]) == 0
    stdout = capsys.readouterr().out
    assert "layers.2.mlp.gate_up -> layers.2.moe.experts.gate_up  (4, 2, 10, 12) float32" in stdout
    assert "new -> layers.2.moe.router" in stdout
    assert main(["convert", str(path), str(target), "--upcycle", str(file)]) == 0
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=10)
    assert torch.equal(logits(target), logits(path, moe))
    run = tiny_run({"train.steps": "3", "checkpoint.load": str(target), "train.eval_steps": "0"})
    pretrained = open_pretrained(target)
    run = replace(run, model=pretrained.model, tokenizer=pretrained.tokenizer)
    mesh = build_single_rank_mesh()
    run_training(run, RunFolder(tmp_path / "run"), mesh, CPU, show=False)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    with pytest.raises(
        CheckpointError, match=r"To upcycle a dense model, run `megalith convert` with"
    ):
        run_training(
            replace(run, checkpoint=replace(run.checkpoint, load=str(path))),
            RunFolder(tmp_path / "other"),
            mesh,
            CPU,
            show=False,
        )


@pytest.mark.parametrize(
    ("changes", "moe", "text"),
    [
        (
            {"moe": WHOLE},
            WHOLE,
            "model.moe.num_experts=4 in the source: it is already a mixture of experts. "
            "Use a dense",
        ),
        ({}, replace(WHOLE, top_k=5), "model.moe.top_k=5 is more than model.moe.num_experts=4"),
        (
            {},
            replace(WHOLE, shared_gate=True),
            "model.moe.shared_gate=true with model.moe.shared_ffn_hidden_size=null",
        ),
        (
            {},
            replace(WHOLE, latent_size=6),
            "model.moe.latent_size=6: experts made of a dense MLP .* Set .*=null",
        ),
        (
            {},
            replace(WHOLE, biases=True),
            "model.moe.biases=true with model.mlp_bias=false .* Set .*=false",
        ),
        (
            {"mlp_bias": True},
            WHOLE,
            "model.moe.biases=false with model.mlp_bias=true .* Set .*=true",
        ),
        (
            {},
            MoEConfig(
                num_experts=4,
                top_k=1,
                ffn_hidden_size=20,
                apply_router_weight_on_input=True,
                router=RouterConfig(norm_topk_prob=False),
            ),
            "model.moe.apply_router_weight_on_input=true: .* Set "
            "model.moe.apply_router_weight_on_input=false",
        ),
        (
            {},
            replace(HALVES, ffn_hidden_size=6),
            r"=6 does not divide the 20 .* to one of \[1, 2, 4, 5, 10, 20\]",
        ),
        (
            {},
            replace(HALVES, top_k=3),
            "model.moe.top_k=3 is no multiple of 2: .* Set model.moe.top_k to 4",
        ),
        (
            {},
            replace(HALVES, num_experts=5),
            "model.moe.num_experts=5 is no multiple of 2: .* Set model.moe.num_experts to 6",
        ),
        (
            {},
            replace(HALVES, top_k=2, router=RouterConfig(num_groups=2, topk_groups=1)),
            r"model.moe.router.num_groups=2 has 3 experts in a group: .* Set "
            r"model.moe.router.num_groups "
            r"to one of \[3\]",
        ),
        (
            {"layers": LayersConfig(ffn_hidden_size=(20, 10, 20))},
            WHOLE,
            r"model.layers.ffn_hidden_size=\[20, 10, 20\]: .* MLPs of \[10, 20\] features, .* Set "
            r"model.moe.layers to",
        ),
    ],
)
def test_model_that_cannot_be_upcycled_is_rejected(
    changes: dict[str, Any], moe: MoEConfig, text: str
) -> None:
    (problem,) = upcycle_problems(replace(DENSE, **changes), moe)
    with pytest.raises(ConfigError, match=text):
        raise ConfigError(problem)


def test_options_of_upcycling_belong_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(dense(tmp_path))
    assert main(["convert", path, str(tmp_path / "x"), "--upcycle-scale", "down"]) != 0
    assert "--upcycle-scale=down needs --upcycle. Set" in capsys.readouterr().err
    assert main(["convert", path, str(tmp_path / "x"), "--upcycle-seed", "3"]) != 0
    assert "--upcycle-seed=3 needs --upcycle. Set" in capsys.readouterr().err
    assert (
        main(["convert", path, str(tmp_path / "x"), "--upcycle", "moe.yaml", "--to", "peft"]) != 0
    )
    assert (
        "--upcycle=moe.yaml with --to=peft: adapters have no experts. Use"
        in capsys.readouterr().err
    )
    assert (
        main(["convert", path, str(tmp_path / "x"), "--upcycle", str(tmp_path / "none.yaml")]) != 0
    )
    assert "none.yaml: no such file. Pass a YAML file that exists." in capsys.readouterr().err
