"""The table of Megatron's flags."""

import re
from pathlib import Path

import pytest
import yaml

import megalith.megatron
from megalith.cli.serve import ServeOptions
from megalith.config.fields import describe, setting_names
from megalith.config.server import ServeRun
from megalith.config.train import TrainRun
from megalith.megatron.parse import (
    FILE_FLAGS,
    FastSafeLoader,
    MegatronFlag,
    known_flags,
    mapped_flags,
    read_flag_table,
    unmapped_flags,
)
from megalith.megatron.serving import OPTIONS
from megalith.megatron.yaml_cfg import YAML_FLAG
from tests.megatron.conftest import Translate

MEGATRON_FLAGS = (Path(__file__).parent.parent / "cli" / "megatron_flags.txt").read_text().split()
ENTRY_KEYS = {
    "mapped": (
        {"flag", "verdict", "type", "setting"},
        {"aliases", "choices", "default", "factor", "program", "reason"},
    ),
    "other": (
        {"flag", "verdict", "effect", "reason"},
        {"type", "program", "requires", "matching_values"},
    ),
}
"""Required and optional keys of an entry."""


def test_every_entry_has_its_keys_and_every_reason_is_used() -> None:
    file = Path(megalith.megatron.__path__[0]) / "flags.yaml"
    table = yaml.load(file.read_text(), Loader=FastSafeLoader)
    assert set(table) == {"flags", "reasons"}
    for entry in table["flags"]:
        required, optional = ENTRY_KEYS["mapped" if entry["verdict"] == "mapped" else "other"]
        assert required <= set(entry) <= required | optional, entry
    unmapped = [entry for entry in table["flags"] if entry["verdict"] != "mapped"]
    assert {entry["reason"] for entry in unmapped} == set(table["reasons"])
    texts = list(table["reasons"].values())
    assert len(set(texts)) == len(texts)


def test_every_flag_of_megatron_has_one_entry() -> None:
    names = [name for flag in read_flag_table() for name in (flag.flag, *flag.aliases)]
    assert len(names) == len(set(names)) and all(name.startswith("--") for name in names)
    assert sorted(set(MEGATRON_FLAGS)) == MEGATRON_FLAGS and len(MEGATRON_FLAGS) > 1000
    assert list(known_flags()) == MEGATRON_FLAGS
    files = {flag.flag for flag in read_flag_table() if flag.type == "file"}
    assert files == {YAML_FLAG, *FILE_FLAGS}


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": "ignored", "reason": "unknown verdict"},
        {"verdict": "already"},
        {"verdict": "mapped"},
        {"verdict": "mapped", "setting": ("seed",), "type": "number"},
        {"verdict": "mapped", "setting": ("seed",), "type": "choice"},
        {"verdict": "already", "reason": "effect is not one of the set", "effect": "speed"},
        {"verdict": "already", "reason": "program is not one of the set", "program": "chat"},
    ],
)
def test_invalid_entry_is_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="--flag"):
        MegatronFlag(flag="--flag", **fields)  # type: ignore[arg-type]  # invalid on purpose


def test_mapped_flags_set_existing_settings_and_defaults_fit_their_type() -> None:
    names = set(setting_names(TrainRun))
    for flag in mapped_flags().values():
        assert set(flag.setting) <= names, flag
        assert flag.default is None or not flag.choices or flag.default in flag.choices, flag
        expected = {"int": int, "float": float}.get(flag.type)
        assert flag.default is None or expected is None or type(flag.default) is expected, flag


def test_mapped_flags_of_servers_set_settings_or_options_of_serve() -> None:
    names = {*setting_names(ServeRun), *OPTIONS}
    options = {setting.path for setting in describe(ServeOptions)}
    assert set(OPTIONS) <= options
    for flag in mapped_flags("serve").values():
        assert len(flag.setting) == 1 and flag.setting[0] in names, flag
        if flag.setting[0].startswith("server."):
            assert flag.setting[0].removeprefix("server.") in options, flag
    assert not mapped_flags().keys() & mapped_flags("serve").keys()


def test_reasons_are_consistent_with_verdict_and_effect() -> None:
    for flag in read_flag_table():
        if flag.verdict == "mapped":
            continue
        assert len(flag.reason) > 15 and not flag.reason.endswith("."), flag
        assert flag.verdict != "already" or flag.effect == "none", flag
        if flag.effect == "model":
            assert re.search(r"\b(Use|use|Remove|Convert|Pass|pass)\b", flag.reason), flag
        required = re.findall(
            r"--[a-z][\w-]+", flag.reason if "takes effect" in flag.reason else ""
        )
        assert {*required, flag.requires or flag.flag} <= set(known_flags()), flag


NOT_IMPLEMENTED = """
    --align-grad-reduce --align-param-gather
    --ddp-pad-buckets-for-high-nccl-busbw --delay-param-gather --disable-align-grad-reduce
    --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
    --distributed-timeout-seconds-after-init --fsdp-db-use-persist-buf-on-alloc-fail
    --fsdp-double-buffer --fsdp-manual-registration --high-priority-a2a-comm-stream
    --high-priority-stream-groups --initialize-socket-comms --kitchen-attention-backend
    --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
    --megatron-fsdp-version --moe-dispatch-fwd-dtype --moe-enable-deepep
    --moe-flex-dispatcher-backend --moe-hybridep-num-sms --moe-ncclep-zero-copy --moe-paged-stash
    --nccl-communicator-config-path --no-align-grad-reduce --no-align-param-gather
    --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --no-use-layer-wise-param-layout
    --overlap-p2p-communication-warmup-flush --overlap-param-gather-with-optimizer-step
    --pipeline-model-parallel-comm-backend --sharp-enabled-group --suggested-communication-unit-size
    --use-gigatoken --use-kitchen-attention --use-ring-exchange-p2p --use-sharp
"""
DONE_DIFFERENTLY = """
    --DDP-impl --apply-query-key-layer-scaling --auto-detect-ckpt-format --bias-gelu-fusion
    --ckpt-assume-constant-structure --data-impl --data-parallel-random-init
    --ddp-average-in-collective --ddp-num-buckets
    --disable-gloo-process-groups --distributed-backend --lazy-mpu-init --mmap-warmup
    --moe-permute-fusion --moe-router-fusion --no-async-tensor-model-parallel-allreduce
    --no-contiguous-buffers-in-local-ddp --no-delay-grad-reduce --no-gradient-accumulation-fusion
    --no-gradient-reduce-div-fusion --no-overlap-p2p-communication
    --no-scatter-gather-tensors-in-pipeline --num-dataset-builder-threads --num-workers
    --per-dataset-sequences-path --tensorboard-log-interval --tensorboard-queue-size
    --tokenizer-hf-no-use-fast --transformer-impl --use-flash-attn
"""


def test_flags_without_implementation_do_not_have_the_verdict_already() -> None:
    for verdict, names in (("not mapped", NOT_IMPLEMENTED), ("explained", DONE_DIFFERENTLY)):
        for name in names.split():
            assert unmapped_flags()[name].verdict == verdict, name


def test_transport_flags_are_reported_as_not_mapped(tiny: Translate) -> None:
    translation = tiny(
        "--nccl-communicator-config-path x --use-sharp --distributed-timeout-seconds-after-init 60"
    )
    entries = {
        entry.flag.split()[0]: entry
        for entry in translation.entries
        if entry.verdict == "not mapped"
    }
    assert entries.keys() == {
        "--nccl-communicator-config-path",
        "--use-sharp",
        "--distributed-timeout-seconds-after-init",
    }
    assert "NCCL_" in entries["--use-sharp"].text and translation.refusals(strict=True) == []


def test_dispatch_in_another_dtype_changes_the_numbers(tiny: Translate) -> None:
    experts = "--num-experts 4 --moe-dispatch-fwd-dtype"
    assert tiny(f"{experts} bf16").refusals(strict=True) == []
    (message,) = tiny(f"{experts} fp8").refusals(strict=True)
    assert "token dispatch in a dtype other than that of the model" in message


def test_flags_without_effect_are_accepted_with_strict(tiny: Translate) -> None:
    added = (
        "--use-flash-attn --transformer-impl local --accumulate-allreduce-grads-in-fp32 "
        "--overlap-grad-reduce --calculate-per-token-loss --num-workers 4 "
        "--attention-softmax-in-fp32 --no-position-embedding --ckpt-format torch_dist "
        "--exit-signal-handler --grad-reduce-in-bf16 --openai-gelu"
    )
    translation = tiny(added)
    assert translation.run == tiny().run
    assert translation.refusals(strict=True) == []
    reported = {
        entry.flag.split()[0]
        for entry in translation.entries
        if entry.verdict in ("already", "explained")
    }
    assert {word for word in added.split() if word.startswith("--")} <= reported


@pytest.mark.parametrize(
    ("added", "replacement"),
    [
        ("--batch-size 4", "Use --micro-batch-size and --global-batch-size"),
        ("--warmup 0.1", "Use --lr-warmup-fraction"),
        ("--model-parallel-size 2", "Use --tensor-model-parallel-size"),
        ("--checkpoint-activations", "Use --recompute-granularity full --recompute-method uniform"),
        ("--moe-token-dropping", "Use --moe-expert-capacity-factor"),
        ("--input corpus.jsonl", "use `megalith prepare`"),
        ("--saver core", "use `megalith convert`"),
        ("--vision-model-type clip", "--vision-model-type clip: belongs to"),
    ],
)
def test_flag_that_training_does_not_read_names_its_replacement(
    tiny: Translate, added: str, replacement: str
) -> None:
    entries = tiny(added).entries
    texts = [f"{entry.flag}: {entry.text}" for entry in entries if entry.verdict == "not mapped"]
    assert len(texts) == 1 and replacement in texts[0]


def test_flags_of_other_models_have_no_effect(tiny: Translate) -> None:
    added = "--mask-prob 0.15 --retro-encoder-layers 2 --num-classes 10"
    assert tiny(added).refusals(strict=True) == []


def test_settings_without_a_megatron_flag_are_listed() -> None:
    """A new setting gets an entry of its flag, or is added here."""
    ours = {
        "checkpoint.allow_model_changes",
        "checkpoint.drain_timeout_seconds",
        "checkpoint.folder",
        "checkpoint.best_metric",
        "checkpoint.exchange_buffer_mb",
        "checkpoint.keep_best",
        "checkpoint.local.keep",
        "checkpoint.max_save_failures",
        "checkpoint.missing_keys",
        "checkpoint.new_rows",
        "checkpoint.prefer_weights",
        "checkpoint.skip",
        "checkpoint.storage_retries",
        "checkpoint.storage_timeout_seconds",
        "checkpoint.unexpected_keys",
        "checkpoint.writer_timeout_seconds",
        "data.keep_partial_valid",
        "data.mock_lengths.kind",
        "data.mock_lengths.mean",
        "data.mock_lengths.path",
        "data.mock_lengths.shortest",
        "data.mock_lengths.sigma",
        "data.mock_max_tokens",
        "data.mock_num_documents",
        "data.overlong",
        "data.sft.date",
        "data.sft.packs",
        "fault_detector.model_fault",
        "fault_detector.sigmas",
        "fault_detector.window",
        "fault_detector.rollback_steps",
        "fault_detector.skip_samples_past_spike",
        "fault_detector.max_rollbacks",
        "fault_detector.suspect_steps",
        "fault_detector.replica_check_every",
        "fault_detector.repair_replicas",
        "fault_detector.health_check_every",
        "kernels",
        "kernels.all",
        "kernels.cross_entropy",
        "kernels.dropout",
        "kernels.small_batch_matmul",
        "kernels.experts",
        "kernels.matmul",
        "kernels.norm",
        "kernels.optimizer",
        "lora.alpha",
        "lora.dropout",
        "lora.layers",
        "lora.load",
        "lora.rank",
        "lora.rslora",
        "lora.targets",
        "model.attention.causal",
        "model.attention.chunked",
        "model.attention.qk_norm_eps",
        "model.attention.qk_norm_layers",
        "model.attention.scale",
        "model.attention.softcap",
        "model.attention.window_right",
        "model.block",
        "model.cross.layers",
        "model.cross.memory",
        "fault_injector.bit",
        "fault_injector.confirm",
        "fault_injector.factor",
        "fault_injector.kind",
        "fault_injector.rank",
        "fault_injector.seconds",
        "fault_injector.section",
        "fault_injector.seed",
        "fault_injector.step",
        "fault_injector.target",
        "fault_injector.times",
        "model.init_overrides",
        "model.logit_softcap",
        "model.moe.aux_loss.of_choices",
        "model.moe.router.group_score",
        "model.norm_placement",
        "model.relative.buckets",
        "model.relative.max_distance",
        "model.residual_scale",
        "model.rope.high_freq_factor",
        "model.rope.local_theta",
        "model.rope.long_factors",
        "model.rope.low_freq_factor",
        "model.rope.short_factors",
        "model.rope.skip_growth",
        "model.rope.skip_step",
        "name",
        "observe.callback_times",
        "observe.dump.only",
        "observe.flush_seconds",
        "observe.grad_norm_by_group",
        "observe.log_format",
        "observe.log_levels",
        "observe.log_ranks",
        "observe.mlflow.experiment",
        "observe.mlflow.tracking_uri",
        "observe.max_logit",
        "observe.peak_tflops",
        "observe.plots",
        "observe.straggler_check_every",
        "observe.wandb.group",
        "observe.wandb.mode",
        "observe.wandb.tags",
        "offload.min_numel",
        "optim.adafactor.beta2_decay",
        "optim.adafactor.d",
        "optim.adafactor.eps1",
        "optim.adafactor.eps2",
        "optim.frozen",
        "optim.muon.clip_grad",
        "optim.muon.newton_schulz",
        "optim.nesterov",
        "optim.trained",
        "parallel.bucket_alignment",
        "parallel.check_collectives",
        "parallel.collective_matmul",
        "parallel.context.slicing",
        "parallel.dp",
        "parallel.heartbeat_timeout_seconds",
        "parallel.overlap",
        "parallel.pipeline.schedule",
        "precision.loss_scale.max_overflows",
        "profile.memory",
        "profile.warmup",
        "data.plugin",
        "model.plugins.activation",
        "model.plugins.attention",
        "model.plugins.block",
        "model.plugins.mlp",
        "model.plugins.norm",
        "optim.plugin",
        "optim.plugin_options",
        "optim.soap.max_precondition_dim",
        "recompute.check",
        "replica_group.coordinator",
        "replica_group.diloco.delta_dtype",
        "replica_group.diloco.fragment_delay",
        "replica_group.diloco.fragment_mixing",
        "replica_group.diloco.int8_block_size",
        "replica_group.diloco.num_fragments",
        "replica_group.diloco.outer_lr",
        "replica_group.diloco.outer_momentum",
        "replica_group.diloco.sync_every",
        "replica_group.id",
        "replica_group.max_groups",
        "replica_group.min_groups",
        "replica_group.mode",
        "replica_group.timeout_seconds",
        "restart.max_in_place",
        "restart.rendezvous_timeout_seconds",
        "restart.window_minutes",
        "schedule.plugin",
        "callbacks",
        "train.callbacks",
        "train.ema.decay",
        "fault_detector.check_update_size",
        "train.exit_margin_minutes",
        "train.termination_grace_seconds",
        "train.sigusr1_action",
        "train.ema.device",
        "train.ema.every",
        "train.ema.start_step",
        "train.loss_plugin",
        "recompute.device",
        "tokenizer.eod",
        "data.phases",
        "schedule.scale_lr_with_batch_size",
        "train.balance_rows",
        "train.uneven_batch",
        "train.compile",
        "train.label_smoothing",
        "train.loss_backward",
        "train.loss_chunk",
        "train.threads",
        "train.z_loss",
    }
    mapped = {setting for flag in mapped_flags().values() for setting in flag.setting}
    assert set(setting_names(TrainRun)) - mapped == ours
