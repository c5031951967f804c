"""Every rule names the field, its value, the reason and a value that would work; all broken ones
come together."""

from dataclasses import replace

import pytest

from megalith.config.data import DataConfig
from megalith.config.fields import describe, union_options
from megalith.config.model import ModelConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError
from megalith.recipes import recipes, resolve
from megalith.rules.run import check_run, model_problems, run_problems
from megalith.testing.tiny import tiny_run


def run(**overrides: str) -> TrainRun:
    """A run that breaks no rule, with dotted settings changed (written with __ for the dot)."""
    sound = TrainRun(
        name="sound",
        model=ModelConfig(
            vocab_size=100,
            hidden_size=48,
            num_layers=2,
            num_heads=8,
            num_kv_heads=4,
            ffn_hidden_size=64,
            max_seq_len=64,
        ),
        data=DataConfig(mock=True),
        train=LoopConfig(steps=10, global_batch_size=12, micro_batch_size=2, seq_len=32),
        schedule=ScheduleConfig(lr=1e-3),
    )
    return apply_overrides(
        sound, {name.replace("__", "."): value for name, value in overrides.items()}
    )


def test_valid_run_violates_no_rule() -> None:
    assert run_problems(run(), 1) == []
    assert run_problems(run(parallel__tp="2", parallel__sp="true"), 6) == []
    assert run_problems(run(parallel__pp="2", parallel__pipeline__schedule="zb-h1"), 4) == []
    assert run_problems(run(parallel__pipeline__layout="only for pp > 1"), 1) == []


TWO_CHUNKS = {"parallel__pp": "2", "parallel__pipeline__vpp": "2", "model__num_layers": "4"}
TIED_CHUNKS = {
    "parallel__pipeline__vpp": "2",
    "parallel__zero": "3",
    "model__tied_embeddings": "true",
}
MTP_SPLIT_STAGES = {
    "parallel__pipeline__layout": "Et|t|m|L",
    "model__mtp__num_layers": "1",
    "model__num_layers": "2",
}
CASES = [
    (
        TIED_CHUNKS,
        2,
        "parallel.zero=3 with parallel.pp=1, parallel.pipeline.vpp=2 and "
        "model.tied_embeddings=true",
        "Set parallel.pipeline.vpp=1, or parallel.zero=2",
    ),
    (
        {"parallel__pipeline__vpp": "2", "parallel__zero": "3", "model__mtp__num_layers": "1"},
        2,
        "parallel.zero=3 with parallel.pp=1, parallel.pipeline.vpp=2 and model.mtp.num_layers=1",
        "Set parallel.pipeline.vpp=1, or parallel.zero=2",
    ),
    (
        {"parallel__pipeline__vpp": "2", "parallel__zero": "3", "model__positions": "relative"},
        2,
        "parallel.zero=3 with parallel.pipeline.vpp=2 and model.positions=relative",
        "Set parallel.pipeline.vpp=1, or parallel.zero=2",
    ),
    (
        MTP_SPLIT_STAGES
        | {"parallel__pp": "2", "parallel__pipeline__vpp": "2", "parallel__zero": "3"},
        4,
        "parallel.zero=3 with parallel.pp=2, parallel.pipeline.vpp=2 and model.mtp.num_layers=1: "
        "two "
        "chunks of a rank",
        "Set parallel.pipeline.vpp=1, or parallel.zero=2",
    ),
    (
        MTP_SPLIT_STAGES | {"parallel__pp": "4", "model__mtp__num_layers": "2"},
        4,
        "parallel.pipeline.layout=Et|t|m|L has 1 MTP layers (m), but model.mtp.num_layers=2",
        "Use 2, as in E|t|t|mmL",
    ),
    (
        {"model__num_kv_heads": "3"},
        1,
        "model.num_kv_heads=3 does not divide model.num_heads=8",
        "one of [1, 2, 4, 8]",
    ),
    (
        {"model__hidden_size": "50"},
        1,
        "model.hidden_size=50 is not a multiple of model.num_heads=8",
        "48 or 56",
    ),
    (
        {"model__dropout__residual": "1.0"},
        1,
        "model.dropout.residual=1.0 must be below 1",
        "Use 0.1",
    ),
    (
        {"model__gated": "false", "model__activation_clamp": "7.0", "model__up_offset": "1.0"},
        1,
        "model.activation_clamp=7.0, model.up_offset=1.0 with model.gated=false",
        "Set model.gated=true, or remove",
    ),
    (
        {"model__logit_softcap": "0"},
        1,
        "model.logit_softcap=0.0 must be a finite number above 0",
        "Use 30.0",
    ),
    ({"model__head_dim": "5"}, 1, "model.head_dim=5 is odd", "Set model.head_dim to 6"),
    (
        {"model__mtp__num_layers": "-1"},
        1,
        "model.mtp.num_layers=-1 must be at least 0",
        "to 0 or more",
    ),
    (
        {"model__mtp__num_layers": "32"},
        1,
        "train.seq_len=32 with model.mtp.num_layers=32",
        "Set train.seq_len to 33 or more",
    ),
    (
        {"model__attention__window": "0"},
        1,
        "model.attention.window=0 must be at least 1",
        "to 1 or more",
    ),
    (
        {"model__num_kv_heads": "8", "model__layers__num_kv_heads": "[8, 2]", "parallel__tp": "4"},
        4,
        "parallel.tp=4 with model.layers.num_kv_heads=[8, 2]: KV heads would be",
        "Set parallel.tp to 2 or less",
    ),
    (
        {
            "model__ffn_hidden_size": "9",
            "model__layers__ffn_hidden_size": "[9, 3]",
            "parallel__tp": "4",
        },
        4,
        "parallel.tp=4 is more than model.layers.ffn_hidden_size=3",
        "at most 3",
    ),
    (
        {"parallel__tp": "6"},
        6,
        "parallel.tp=6 does not fit model.num_kv_heads=4",
        "one of [1, 2, 3, 4, 8]",
    ),
    (
        {"model__ffn_hidden_size": "3", "parallel__tp": "4"},
        4,
        "parallel.tp=4 is more than model.ffn_hidden_size=3",
        "at most 3",
    ),
    ({"parallel__sp": "true"}, 1, "parallel.sp=true needs parallel.tp > 1", "Set parallel.tp to 2"),
    (
        {"parallel__tp_comm_overlap": "true"},
        1,
        "parallel.tp_comm_overlap=true needs parallel.sp=true",
        "Set both, or remove",
    ),
    (
        {"parallel__collective_matmul": "fused"},
        1,
        "parallel.collective_matmul=fused with parallel.tp_comm_overlap=false",
        "Set parallel.tp_comm_overlap=true, or parallel.collective_matmul=auto",
    ),
    (
        {"parallel__dp_replicate": "2"},
        2,
        "parallel.dp_replicate=2 with parallel.zero=0",
        "Set parallel.zero=1",
    ),
    (
        {"parallel__dp_replicate": "4", "parallel__zero": "1"},
        6,
        "parallel.dp_replicate=4 does not divide dp=6",
        "one of [1, 2, 3, 6]",
    ),
    (
        {"parallel__reduce_dtype": "bf16"},
        2,
        "parallel.reduce_dtype=bf16 with parallel.zero=0",
        "Set parallel.zero=1",
    ),
    (
        {"parallel__bucket_alignment": "matrices", "parallel__zero": "1"},
        2,
        "parallel.bucket_alignment=matrices with optim.kind=adamw",
        "optim.kind=muon",
    ),
    (
        {"optim__nesterov": "true"},
        1,
        "optim.nesterov=true needs optim.kind=sgd",
        "Set optim.kind=sgd",
    ),
    (
        {
            "parallel__sp": "true",
            "parallel__tp": "4",
            "train__seq_len": "31",
            "train__micro_batch_size": "1",
        },
        4,
        "= 1 * 31 = 31 tokens do not divide over parallel.tp=4",
        "train.seq_len to 32",
    ),
    (
        {"train__seq_len": "65"},
        1,
        "train.seq_len=65 is more than model.max_seq_len=64",
        "64 or less",
    ),
    (
        {"train__compile": "true", "parallel__tp": "2"},
        2,
        "train.compile=true with parallel.tp=2",
        "Set train.compile=false, or the degrees to 1",
    ),
    (
        {"train__compile": "true", "parallel__cp": "2"},
        2,
        "train.compile=true with parallel.cp=2",
        "Set train.compile=false, or the degrees to 1",
    ),
    (
        {"parallel__pp": "3"},
        3,
        "model.num_layers=2 does not divide over parallel.pp * parallel.pipeline.vpp = 3 * 1",
        "parallel.pp to one of [1, 2], or parallel.pipeline.layout=E|tt|L.",
    ),
    (
        {"parallel__pp": "2", "parallel__pipeline__layout": "Et|t"},
        2,
        "has no L: the loss is on no stage",
        "Use one L at the end.",
    ),
    (
        {"parallel__pp": "2", "parallel__pipeline__schedule": "zb-v"},
        2,
        "parallel.pipeline.vpp=1: schedule zb-v",
        "Set parallel.pipeline.vpp=2.",
    ),
    (
        {**TWO_CHUNKS, "train__global_batch_size": "2"},
        2,
        "1 microbatches per step are fewer than parallel.pp=2",
        "Set train.global_batch_size to 4",
    ),
    (
        {"parallel__pp": "2", "parallel__pipeline__schedule": "zb-h1", "train__compile": "true"},
        2,
        "train.compile=true with parallel.pipeline.schedule=zb-h1",
        "one of gpipe, 1f1b, interleaved",
    ),
    (
        {"parallel__pipeline__vpp": "0"},
        1,
        "parallel.pipeline.vpp=0 must be at least 1",
        "to 1 or more",
    ),
    (
        {"parallel__cp": "2", "train__seq_len": "30"},
        2,
        "train.seq_len=30 does not divide by 2 * 2 = 4",
        "Set train.seq_len to 32 or 28, or parallel.context.slicing to document, which pads",
    ),
    (
        {"parallel__cp": "2", "parallel__tp": "2", "parallel__sp": "true", "train__seq_len": "28"},
        4,
        "train.seq_len=28 does not divide by 2 * parallel.cp * parallel.tp = 2 * 2 * 2 = 8",
        "to 32 or 24",
    ),
    (
        {"parallel__cp": "16", "parallel__context__kind": "a2a", "train__seq_len": "32"},
        16,
        "parallel.cp=16 with a2a: model.num_heads=8 over parallel.tp=1 are 8 heads on a rank",
        "to ring or gather",
    ),
    (
        {"parallel__cp": "4", "parallel__context__kind": "a2a+ring"},
        4,
        "parallel.context.a2a=None does not divide parallel.cp=4",
        "Set parallel.context.a2a to one of [2]",
    ),
    (
        {"parallel__cp": "2", "parallel__context__layers": "[ring]"},
        2,
        "parallel.context.layers names 1 kinds for model.num_layers=2",
        "Use one for each",
    ),
    ({"parallel__cp": "0"}, 1, "parallel.cp=0 must be at least 1", "Set parallel.cp to 1 or more"),
    (
        {"recompute__granularity": "selective", "recompute__modules": "[norm, mlp, norm]"},
        1,
        "recompute.modules=['norm', 'mlp', 'norm'] names norm more than once",
        "Set recompute.modules to [norm, mlp].",
    ),
    (
        {
            "recompute__granularity": "selective",
            "recompute__modules": "[mlp]",
            "recompute__mlp_chunks": "999999",
        },
        1,
        "recompute.mlp_chunks=999999 is more than the",
        "Set recompute.mlp_chunks to ",
    ),
    (
        {"recompute__granularity": "selective", "recompute__modules": "[]"},
        1,
        "recompute.modules=[] has nothing to recompute",
        "Set recompute.modules to [core_attention]",
    ),
    (
        {"recompute__granularity": "full", "recompute__shard_inputs": "true"},
        1,
        "recompute.shard_inputs=true shards inputs over tensor-parallel ranks",
        "Set parallel.tp to 2 or more",
    ),
    (
        {"offload__layers": "2"},
        1,
        "offload.layers=2 must be less than the 2 layers of a stage",
        "to 1",
    ),
    (
        {"offload__layers": "1", "parallel__pp": "2"},
        2,
        "offload.layers=1 must be less than the 1",
        "to 0 or less",
    ),
    (
        {"train__eval_every": "5"},
        1,
        "train.eval_every=5 but train.eval_steps=0",
        "set train.eval_steps to 10",
    ),
    (
        {"train__eval_every": "-1"},
        1,
        "train.eval_every=-1 must be at least 0",
        "to 0 or more",
    ),
    (
        {"train__label_smoothing": "1.0"},
        1,
        "train.label_smoothing=1.0 must be below 1",
        "Use 0.1.",
    ),
    (
        {"train__z_loss": "-1"},
        1,
        "train.z_loss=-1.0 must be a finite number of at least 0",
        "Use 0.0001",
    ),
    (
        {"train__loss_chunk": "0"},
        1,
        "train.loss_chunk=0 must be at least 1",
        "Use 1024.",
    ),
    ({"optim__beta2": "1.0"}, 1, "optim.beta2=1.0 must be below 1", "Use 0.95"),
    ({"optim__eps": "0"}, 1, "optim.eps=0.0 must be a finite number above 0", "Use 1e-08"),
    (
        {"optim__clip_grad": "-1"},
        1,
        "optim.clip_grad=-1.0 must be a finite number of at least 0",
        "to 0 or more",
    ),
    ({"optim__eps": "inf"}, 1, "optim.eps=inf must be a finite number above 0", "Use 1e-08"),
    (
        {"model__rope__factor": "0"},
        1,
        "model.rope.factor=0.0 must be a finite number above 0",
        "Use 8.0",
    ),
    (
        {"model__rope__theta": "inf"},
        1,
        "model.rope.theta=inf must be a finite number above 0",
        "Use 10000.0",
    ),
    (
        {"model__rope__original_max_position": "0"},
        1,
        "original_max_position=0 must be at least 1",
        "to 1 or more",
    ),
    (
        {"model__rope__scaling": "llama3", "model__rope__low_freq_factor": "5"},
        1,
        "model.rope.low_freq_factor=5.0 must be at most model.rope.high_freq_factor=4.0",
        "Use 1.0 and 4.0",
    ),
    (
        {"model__init_std": "inf"},
        1,
        "model.init_std=inf must be a finite number of at least 0",
        "to 0 or more",
    ),
    (
        {"model__init_std": "nan"},
        1,
        "model.init_std=nan must be a finite number of at least 0",
        "to 0 or more",
    ),
    (
        {"observe__peak_tflops": "-3"},
        1,
        "observe.peak_tflops=-3.0 must be a finite number above 0",
        "Use 100.0",
    ),
    (
        {"train__max_minutes": "-1"},
        1,
        "train.max_minutes=-1.0 must be a finite number of at least 0",
        "to 0 or more",
    ),
    (
        {"fault_detector__spike": "rollback", "checkpoint__every": "0"},
        1,
        "fault_detector.spike=rollback with checkpoint.every=0: no step before the last is saved",
        "Set checkpoint.every to a number from 1 to",
    ),
    (
        {"fault_detector__model_fault": "rollback", "fault_detector__max_rollbacks": "0"},
        1,
        "fault_detector.model_fault=rollback with fault_detector.max_rollbacks=0: no rollback",
        "Set fault_detector.max_rollbacks=3, or fault_detector.model_fault=stop",
    ),
    (
        {"fault_detector__nonfinite": "rollback", "checkpoint__save_optimizer": "false"},
        1,
        "fault_detector.nonfinite=rollback with checkpoint.save_optimizer=false: a rollback would",
        "Set checkpoint.save_optimizer=true, or fault_detector.nonfinite=skip",
    ),
    (
        {"fault_detector__nonfinite": "skip", "optim__nonfinite_grad": "raise"},
        1,
        "fault_detector.nonfinite=skip with optim.nonfinite_grad=raise: a gradient that is not",
        "Set optim.nonfinite_grad=skip, or fault_detector.nonfinite=stop",
    ),
    (
        {"checkpoint__every": "-1"},
        1,
        "checkpoint.every=-1 must be at least 0",
        "to 0 or more",
    ),
    (
        {"checkpoint__max_save_failures": "0"},
        1,
        "checkpoint.max_save_failures=0 must be at least 1",
        "to 1 or more",
    ),
    (
        {"train__steps": str(10**15)},
        1,
        "train.steps=1000000000000000 * train.global_batch_size=12",
        "to 5726623061 or",
    ),
    ({"train__steps": "0"}, 1, "train.steps=0 must be at least 1", "Set train.steps to 1 or more"),
    ({"checkpoint__keep": "0"}, 1, "checkpoint.keep=0 must be at least 1", "Set checkpoint.keep"),
    ({"train__global_batch_size": "7"}, 1, "train.global_batch_size=7 is not a multiple", "6 or 8"),
    ({"parallel__tp": "4"}, 6, "world", "4"),
    (
        {"schedule__weight_decay": "1e308"},
        1,
        "schedule.weight_decay=1e+308 must be at most 1000",
        "to 1000 or less",
    ),
    (
        {"schedule__lr": "1e30"},
        1,
        "schedule.lr=1e+30 must be at most 1000",
        "Set schedule.lr to 1000 or less",
    ),
    (
        {"schedule__weight_decay": "900", "schedule__lr": "0.01"},
        1,
        "1 - lr * decay = -8",
        "to 200 or less",
    ),
    (
        {
            "schedule__weight_decay": "900",
            "schedule__lr": "0.01",
            "optim__decoupled_weight_decay": "false",
            "optim__groups": "[{name: a, match: ['*.down'], kind: lion}]",
        },
        1,
        "1 - lr * decay = -8",
        "to 200 or less",
    ),
    (
        {"optim__groups": "[{name: a, match: [embed.weight], weight_decay: 1e308}]"},
        1,
        "optim.groups[0].weight_decay=1e+308 must be at most 1000",
        "to 1000 or less",
    ),
    (
        {"model__init_overrides": "[['*', 1e308]]"},
        1,
        "model.init_overrides[0][1]=1e+308 must be at most",
        "to 1000",
    ),
    (
        {"parallel__pp": "2147483648"},
        1,
        "parallel.pp=2147483648 must be at most 4096",
        "to 4096 or less",
    ),
    (
        {"parallel__tp": "2147483648"},
        1,
        "parallel.tp=2147483648 must be at most 1048576",
        "to 1048576 or less",
    ),
    (
        {"train__global_batch_size": "9223372036854775807"},
        1,
        "is not a multiple of train.micro_batch_size",
        "Set",
    ),
    (
        {"model__num_layers": "2147483648"},
        1,
        "model.num_layers=2147483648 must be at most 16384",
        "to 16384 or less",
    ),
    (
        {"name": "a" * 300},
        1,
        "it must have 1 to 200 bytes",
        "Set name to one such as my_run",
    ),
]


@pytest.mark.parametrize(("changed", "world", "output", "fix"), CASES)
def test_violated_rule_names_setting_and_valid_value(
    changed: dict[str, str], world: int, output: str, fix: str
) -> None:
    problems = run_problems(run(**changed), world)
    assert any(output in problem and fix in problem for problem in problems), problems


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "...",
        "/tmp/x",
        "../../x",
        "a/b",
        "a/",
        "..\\x",
        "a\nb",
        "a\0b",
        "\udcff",
        "x" * 201,
    ],
)
def test_name_that_leads_out_of_runs_is_rejected(name: str) -> None:
    (problem,) = run_problems(replace(run(), name=name), 1)
    assert problem.startswith(f"name={name!r:.60} cannot be the name of a folder under runs/")
    assert problem.endswith(
        "Set name to one such as my_run; to train in another folder, pass --run with its path."
    )


@pytest.mark.parametrize("name", ["x", ".x", "llama-3.1_8b", "größer", "with a space", "x" * 200])
def test_plain_name_is_accepted(name: str) -> None:
    assert run_problems(replace(run(), name=name), 1) == []


def test_every_number_has_a_finite_upper_bound() -> None:
    floats = [
        setting.path for setting in describe(TrainRun) if float in union_options(setting.hint)
    ]
    full = tiny_run(
        {"model.moe.num_experts": "4", "model.moe.top_k": "2", "model.moe.ffn_hidden_size": "6"}
    )
    required = {
        "replica_group": {"replica_group.coordinator": "127.0.0.1:29700", "replica_group.id": "a"},
        "fault_injector": {"fault_injector.kind": "slow", "fault_injector.confirm": "true"},
    }
    for path in floats:
        if path.startswith(("model.mla", "model.mup", "lora")):  # sections that need more settings
            continue
        settings = required.get(path.partition(".")[0], {}) | {path: "1e308"}
        problems = run_problems(apply_overrides(full, settings), 1)
        assert any(f"{path}=1e+308" in text for text in problems), (path, problems)


def test_recipes_stay_below_the_upper_bounds() -> None:
    for name in recipes():
        assert not [
            text for text in run_problems(resolve(name), 1) if " must be at most " in text
        ], name


def test_fuzzed_values_of_every_setting_are_accepted_or_rejected_with_text() -> None:
    values = [
        "",
        "-1",
        "0",
        "2147483648",
        "9223372036854775807",
        "9" * 40,
        "1e308",
        "-1e308",
        "nan",
        "true",
        "none",
        "x" * 300,
        "[",
        "[1, [2]]",
        "{a: b}",
        "&a [*a]",
        "\x07",
    ]
    for number, setting in enumerate(describe(TrainRun)):
        for value in values:
            try:
                changed = apply_overrides(run(), {setting.path: value})
                problems = run_problems(changed, 1 + number % 2)
            except ConfigError:
                continue
            except Exception as error:
                pytest.fail(f"{setting.path}={value!r}: {error!r}")
            assert all(len(text) < 3000 for text in problems), (
                f"{setting.path}={value!r}: {problems}"
            )


def test_all_violated_rules_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(run(model__num_kv_heads="3", train__seq_len="65", optim__beta1="2"), 1)
    text = str(caught.value)
    assert text.startswith("3 settings must be changed")
    assert all(
        field in text for field in ("model.num_kv_heads=3", "train.seq_len=65", "optim.beta1=2.0")
    )


@pytest.mark.parametrize(
    ("recipe", "settings", "world", "output"),
    [
        (
            "llama3_8b",
            {},
            7,
            "use 4 or 8 processes, or choose tp, cp, pp",
        ),  # sp: neither 1 nor 7 divides the tokens
        (
            "llama3_8b",
            {"parallel.tp": "4", "parallel.sp": "false"},
            6,
            "or set parallel.tp to one of [3, 6]",
        ),
        (
            "tiny_cpu",
            {"parallel.tp": "3", "model.num_kv_heads": "1"},
            4,
            "tp to one of [2, 4]",
        ),  # dp 4: too few rows
        (
            "tiny_cpu",
            {"parallel.pp": "3", "parallel.dp": "1"},
            4,
            "use 3 processes, or choose tp, cp, pp",
        ),
    ],
)
def test_recommended_degrees_violate_no_other_rule(
    recipe: str, settings: dict[str, str], world: int, output: str
) -> None:
    run = apply_overrides(resolve(recipe), settings)
    (text,) = [text for text in run_problems(run, world) if text.startswith("world_size=")]
    assert output in text


def test_invalid_number_does_not_hide_another_problem() -> None:
    problems = run_problems(
        run(optim__eps="0", model__norm_eps="-1", seed="-2", train__steps="0", data__mock="false"),
        1,
    )
    for start in ("optim.eps=", "model.norm_eps=", "seed=", "train.steps=", "data has 0 sources"):
        assert sum(text.startswith(start) for text in problems) == 1, start
    assert len(problems) == 5


def test_invalid_step_count_does_not_fail_schedule_rules() -> None:
    wsd = {
        "schedule__style": "wsd",
        "schedule__wsd_decay_steps": "3",
        "schedule__warmup_steps": "5",
    }
    (text,) = run_problems(run(train__steps="-4", **wsd), 1)
    assert text.startswith("train.steps=-4 must be at least 1")
    assert any(
        "schedule.lr" in text for text in run_problems(run(train__steps="-4", schedule__lr="-1"), 1)
    )


def test_the_model_alone_can_be_checked_without_data() -> None:
    assert model_problems(run(data__mock="false")) == []
    assert "model.head_dim=5" in model_problems(run(model__head_dim="5"))[0]
    assert (
        "model.rope.theta=0.0" in model_problems(run(model__rope__theta="0", data__mock="false"))[0]
    )


def test_conversation_data_is_text() -> None:
    run = tiny_run(
        {"data.mock": "false", "data.sft.mock_conversations": "3", "tokenizer.kind": "null"}
    )
    (problem,) = run_problems(apply_overrides(run, {"tokenizer.vocab_size": "257"}), 1)
    assert problem.startswith("tokenizer.kind=null with data.sft: conversations are text")


def test_documents_in_packs_need_no_rows_that_divide() -> None:
    packed = {
        "train__tokens_per_microbatch": "64",
        "train__micro_batch_size": "1",
        "train__global_batch_size": "13",
    }
    assert run_problems(run(**packed), 5) == []
    assert (
        run_problems(run(**packed, parallel__cp="2", parallel__tp="2", parallel__sp="true"), 4)
        == []
    )
    assert run_problems(run(**packed, **TWO_CHUNKS, model__max_seq_len="64"), 6) == []
    with pytest.raises(ConfigError) as caught:
        check_run(
            run(**packed | {"train__micro_batch_size": "2", "train__tokens_per_microbatch": "30"}),
            1,
        )
    assert "a microbatch is one pack. Set train.micro_batch_size=1" in str(caught.value)
    text = "train.tokens_per_microbatch=30 * parallel.cp=1 = 30 tokens do not hold a document"
    assert text in str(caught.value)
    (text,) = run_problems(run(**packed, **TWO_CHUNKS, parallel__pipeline__group="1"), 2)
    assert text.startswith("parallel.pipeline.group=1 must be from parallel.pp=2")
    (text,) = run_problems(run(train__tokens_per_microbatch="0"), 1)
    assert (
        text
        == "train.tokens_per_microbatch=0 must be at least 1. Set train.tokens_per_microbatch to 1 "
        "or more."
    )


def test_router_without_gradient_is_rejected_in_new_runs_and_reported_in_others() -> None:
    single = {
        "model.moe.num_experts": "4",
        "model.moe.top_k": "1",
        "model.moe.ffn_hidden_size": "6",
    }
    (text,) = run_problems(tiny_run(single), 1)
    assert "Set model.moe.router.norm_topk_prob=false" in text
    assert run_problems(tiny_run(single | {"checkpoint.load": "theirs"}), 1) == []
    assert len(model_problems(tiny_run(single))) == 1
