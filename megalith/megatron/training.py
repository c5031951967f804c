"""Translate batches, steps, precision, optimizer, schedules and folders to our settings."""

import re
from collections.abc import Sequence

from megalith.config.data import parse_blend, parse_split
from megalith.config.fields import Plain
from megalith.config.train import is_suite_name
from megalith.errors import ConfigError, PlanError
from megalith.megatron.parse import Draft
from megalith.megatron.update_rules import add_parameter_group, translate_update_rule
from megalith.plan.batch_schedule import (
    BatchSizeSchedule,
    constant_batch_size,
    parse_step_schedule,
    plan_linear_rampup,
)

_MICRO, _GLOBAL = "--micro-batch-size", "--global-batch-size"
_ITERS, _SAMPLES = "--train-iters", "--train-samples"
_GLOBAL_SETTING = "train.global_batch_size"
_RAMPUP, _STEP_SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"
_SKIPPED = "--iterations-to-skip"
_SCHEDULE_SETTING = "train.batch_size_schedule"


def translate_steps(draft: Draft, dp: int | None) -> None:
    """Translate batch sizes and steps. `dp`: data-parallel size of the job, if known."""
    draft.need("--seq-length", "the tokens per row")
    draft.need(_MICRO, "the rows of a microbatch")
    for flag in ("--seq-length", _MICRO, "--log-interval", "--exit-duration-in-mins", "--seed"):
        draft.copy(flag)
    _translate_batch_sizes(draft, dp)
    _translate_length(draft)
    _translate_skipped_steps(draft)
    _translate_evaluation(draft)


def _read_count(draft: Draft, setting: str) -> int:
    """Return a setting that is a positive number; 1 if it is not, which is already a problem."""
    count = draft.settings.get(setting)
    return count if isinstance(count, int) and count > 0 else 1


def _translate_batch_sizes(draft: Draft, dp: int | None) -> None:
    """Translate the global batch size, or the schedule of global batch sizes."""
    if draft.arguments.given(_STEP_SCHEDULE):
        _translate_step_schedule(draft)
        return
    _translate_global_batch(draft, dp)
    words = draft.arguments.value(_RAMPUP)
    if not words or not draft.sure(_GLOBAL_SETTING):
        return
    if len(words) != 3 or not all(word.isdecimal() for word in words):
        draft.problems.append(
            f"{draft.arguments.typed(_RAMPUP)}: expected three whole numbers, the first size, the "
            f"increment and the samples. Use for example {_RAMPUP} 32 32 1000000."
        )
        return
    start, increment, num_samples = map(int, words)
    try:
        schedule = plan_linear_rampup(
            start=start,
            increment=increment,
            num_samples=num_samples,
            size=_read_count(draft, _GLOBAL_SETTING),
        )
    except PlanError as error:
        draft.problems.append(str(error))
        return
    _put_schedule(draft, _RAMPUP, schedule, of=(_GLOBAL_SETTING,))


def _translate_step_schedule(draft: Draft) -> None:
    """Translate a step schedule, whose last size is the global batch size."""
    for flag in (_GLOBAL, _RAMPUP):
        if draft.arguments.given(flag):
            draft.problems.append(
                f"{_STEP_SCHEDULE} and {draft.arguments.typed(flag)}: expected one of them. Remove "
                f"{flag}: the last size of the schedule is the global batch size."
            )
    try:
        schedule = parse_step_schedule(
            " ".join(draft.arguments.value(_STEP_SCHEDULE) or ()),
            seq_len=_read_count(draft, "train.seq_len"),
        )
    except PlanError as error:
        draft.problems.append(str(error))
        return
    text = "the last size of the schedule"
    draft.put(_STEP_SCHEDULE, _GLOBAL_SETTING, schedule.sizes[-1], text, of=("train.seq_len",))
    _put_schedule(draft, _STEP_SCHEDULE, schedule, of=("train.seq_len",))


def _put_schedule(
    draft: Draft, flag: str, schedule: BatchSizeSchedule, *, of: tuple[str, ...]
) -> None:
    """Set the batch-size schedule; a single size is no schedule."""
    if schedule.is_constant:
        draft.report("already", flag, f"every step has {schedule.sizes[0]} samples")
        return
    entries: list[Plain] = [
        {"samples": start, "size": size}
        for start, size in zip(schedule.starts, schedule.sizes, strict=True)
    ]
    draft.put(flag, _SCHEDULE_SETTING, entries, of=of)


def _read_schedule(draft: Draft) -> BatchSizeSchedule:
    """Return the batch-size schedule of the settings."""
    entries = draft.settings.get(_SCHEDULE_SETTING)
    if not entries:
        return constant_batch_size(_read_count(draft, _GLOBAL_SETTING))
    return BatchSizeSchedule(
        tuple(entry["samples"] for entry in entries), tuple(entry["size"] for entry in entries)
    )


def _translate_skipped_steps(draft: Draft) -> None:
    words = draft.arguments.value(_SKIPPED)
    if not words:
        return
    if not all(word.isdecimal() for word in words):
        draft.problems.append(
            f"{draft.arguments.typed(_SKIPPED)}: expected numbers of iterations. Use for example "
            f"{_SKIPPED} 100 101."
        )
        return
    steps = sorted({int(word) + 1 for word in words})
    last = draft.settings.get("train.steps")
    if isinstance(last, int):  # Megatron never reaches the others
        steps = [step for step in steps if step <= last]
    text = "Megatron numbers a step by the iterations before it"
    draft.put(_SKIPPED, "train.skip_steps", steps, text)


def _translate_global_batch(draft: Draft, dp: int | None) -> None:
    if draft.arguments.value(_GLOBAL) is not None:
        draft.copy(_GLOBAL)
    elif dp is not None:
        size = draft.number(_MICRO)
        text = f"{_MICRO} {size} · {dp} data-parallel ranks"
        draft.put(_GLOBAL, _GLOBAL_SETTING, size * dp, text, of=(_MICRO,))
    else:
        draft.problems.append(
            f"{_GLOBAL} is missing: Megatron uses {_MICRO} times the number of data-parallel "
            f"ranks, which is not known. Pass {_GLOBAL}, or --world with the number of ranks of "
            "the job."
        )


def _translate_length(draft: Draft) -> None:
    steps, samples = draft.arguments.value(_ITERS), draft.arguments.value(_SAMPLES)
    if (steps is None) == (samples is None):
        flags = (_ITERS, _SAMPLES)
        typed = [draft.arguments.typed(flag) for flag in flags if draft.arguments.given(flag)]
        given = " and ".join(typed) or f"{' and '.join(flags)} are missing"
        draft.problems.append(f"{given}: expected exactly one of them. Set one of them.")
    if steps is not None:
        draft.copy(_ITERS)
    elif samples is not None:
        schedule = _read_schedule(draft)
        num_steps = schedule.count_steps(samples)
        text = f"/ {schedule.sizes[0]} per step"
        if not schedule.is_constant:
            text = f"steps of the sizes in {_SCHEDULE_SETTING}"
        draft.put(_SAMPLES, "train.steps", num_steps, text, of=(_GLOBAL_SETTING,))
        if samples != schedule.count_samples(num_steps) and draft.sure(_GLOBAL_SETTING):
            text = "keeps the sample order of Megatron"
            draft.put(_SAMPLES, "data.num_train_samples", samples, text)


def _translate_evaluation(draft: Draft) -> None:
    interval_flag, steps_flag = "--eval-interval", "--eval-iters"
    interval, steps = draft.arguments.value(interval_flag), draft.arguments.value(steps_flag)
    if not _has_validation(draft):
        draft.put(steps_flag, "train.eval_steps", 0)
        if draft.arguments.given(steps_flag) or draft.arguments.given(interval_flag):
            text = "nothing is evaluated, because there is no validation data"
            draft.report("explained", steps_flag, text)
        return
    if any(draft.arguments.value(flag) for flag in _SUITES):
        _translate_suites(draft, interval, steps)
        return
    draft.put(steps_flag, "train.eval_steps", steps)
    if interval is not None and interval > 0 and steps > 0:
        draft.put(interval_flag, "train.eval_every", interval)
    elif steps > 0:
        text = "evaluates after the last step only; Megatron before 0.19 assumes 1000"
        draft.report("explained", interval_flag, text)


_SUITES = (
    "--full-validation",
    "--multiple-validation-sets",
    "--start-eval-at-iter",
    "--eval-micro-batch-size",
    "--eval-global-batch-size",
)


def _translate_suites(draft: Draft, interval: int | None, steps: int) -> None:
    """Translate evaluations that train.eval_every and train.eval_steps do not cover: one suite for
    the validation split, or for each of its sets."""
    arguments = draft.arguments
    full, several, start, micro_batch, global_batch = _SUITES
    suite: dict[str, Plain] = {"every": interval or 0, "start": arguments.value(start) or 0}
    if not arguments.value(full):
        suite["num_samples"] = steps * (
            arguments.value(global_batch) or _read_count(draft, _GLOBAL_SETTING)
        )
    if arguments.value(micro_batch) is not None:
        suite["micro_batch_size"] = arguments.value(micro_batch)
    suites: dict[str, Plain] = {"valid": suite | {"split": "valid"}}
    paths = arguments.value("--valid-data-path")
    if arguments.value(several) and not paths:
        draft.problems.append(
            f"{several} evaluates each set of --valid-data-path, which is missing. Pass "
            f"--valid-data-path with the prefixes of the sets, or remove {several}."
        )
    elif arguments.value(several):
        prefixes = parse_blend("--valid-data-path", paths).prefixes
        names = _name_suites(arguments.value("--validation-set-names") or [], len(prefixes))
        suites = {
            name: suite | {"path": [path]} for name, path in zip(names, prefixes, strict=True)
        }
    draft.put("--eval-iters", "train.eval_steps", 0, "replaced by suites")
    for flag in (*_SUITES, "--validation-set-names", "--eval-interval"):
        if arguments.given(flag):
            draft.put(flag, "evaluate", suites)


def _name_suites(names: Sequence[str], count: int) -> list[str]:
    """Return unique names of `count` suites, which are parts of metrics; a set without a name has
    its number.

    >>> _name_suites(["c++", "c--", "eval"], 4)
    ['c__', 'c___1', 'valid_eval', 'valid_3']
    """
    unique: list[str] = []
    for number in range(count):
        name = re.sub(r"\W", "_", names[number]) if number < len(names) else str(number)
        if not is_suite_name(name):
            name = f"valid_{name}"
        while name in unique:
            name = f"{name}_{number}"
        unique.append(name)
    return unique


def _has_validation(draft: Draft) -> bool:
    arguments, split = draft.arguments, draft.settings.get("data.split")
    valid, paths = "--valid-data-path", ("--train-data-path", "--test-data-path")
    if arguments.value("--sft"):
        return bool(arguments.given(valid) or arguments.value("--mock-data"))
    if any(arguments.given(flag) for flag in (valid, *paths)):
        return arguments.given(valid)
    try:
        return split is None or parse_split(split)[1] is not None
    except ConfigError:  # reported with the rules of the run
        return True


def translate_folders(draft: Draft) -> None:
    """Translate checkpoints and TensorBoard."""
    arguments, interval, setting = draft.arguments, "--save-interval", "checkpoint.every"
    save, load = arguments.value("--save"), arguments.value("--load")
    if save is None:
        draft.put(interval, setting, 0, "without --save only the last step is saved")
    elif arguments.value(interval) is None:
        draft.need(interval, "the steps between two checkpoints")
    else:
        draft.put(interval, setting, arguments.value(interval))
        text = "checkpoints are in the run folder: select it with megalith train --run"
        draft.report("explained", "--save", text)
    if arguments.value("--no-save-optim"):
        draft.put("--no-save-optim", "checkpoint.save_optimizer", False)
    if arguments.value("--async-save"):
        draft.put("--async-save", "checkpoint.async_save", True)
    if arguments.value("--ckpt-fully-parallel-load"):
        draft.put("--ckpt-fully-parallel-load", "checkpoint.parallel_load", True)
    if arguments.given("--dist-ckpt-workers"):
        threads = arguments.value("--dist-ckpt-workers")
        draft.put("--dist-ckpt-workers", "checkpoint.writer_threads", threads)
    _translate_local_checkpoints(draft)
    _translate_load(draft, str(load) if load is not None and load != save else None)
    _translate_retention(draft)
    if arguments.value("--tensorboard-dir") is not None:
        text = "written to tensorboard/ in the run folder"
        draft.put("--tensorboard-dir", "observe.tensorboard", True, text)


def _translate_local_checkpoints(draft: Draft) -> None:
    """Translate non-persistent checkpoints; those of type local have settings."""
    interval, kind, folder, copies, factor, jump = (
        "--non-persistent-save-interval",
        "--non-persistent-ckpt-type",
        "--non-persistent-local-ckpt-dir",
        "--replication",
        "--replication-factor",
        "--replication-jump",
    )
    arguments = draft.arguments
    flags = [
        flag for flag in (interval, kind, folder, copies, factor, jump) if arguments.given(flag)
    ]
    if not flags:
        return
    if arguments.value(kind) != "local" or arguments.value(interval) is None:
        text = f"takes effect only with {kind} local and {interval}"
        for flag in flags:
            draft.report("explained", flag, text)
        return
    draft.put(interval, "checkpoint.local.every", arguments.value(interval))
    draft.report("explained", kind, "local checkpoints: checkpoint.local.every")
    if arguments.value(folder) is not None:
        draft.put(folder, "checkpoint.local.folder", arguments.value(folder))
    if not arguments.value(copies):
        draft.put(copies, "checkpoint.local.replication_factor", 1, "Megatron makes no copies")
        return
    number = arguments.value(factor) if arguments.given(factor) else 2
    draft.put(copies, "checkpoint.local.replication_factor", number)
    if arguments.value(jump) is not None:
        draft.put(jump, "checkpoint.local.replication_jump", arguments.value(jump))


def _translate_load(draft: Draft, load: str | None) -> None:
    """Translate what the run starts from; `load`: another folder than that of --save."""
    arguments, step_flag, pretrained = draft.arguments, "--ckpt-step", "--pretrained-checkpoint"
    step, start = arguments.value(step_flag), arguments.value(pretrained)
    finetune, no_optim = "--finetune", "--no-load-optim"
    if load is not None:
        path = load if step is None else f"{load.rstrip('/')}/iter_{step:07d}"
        draft.put("--load", "checkpoint.load", path, _FIRST_START)
        if step is not None:
            draft.put(step_flag, "checkpoint.load", path)
        mode, flag = "all", "--load"
        if arguments.value(finetune):
            mode, flag = "weights", finetune
        elif arguments.value(no_optim):
            mode, flag = "progress", no_optim
        draft.put(flag, "checkpoint.load_mode", mode)
        if start is not None:
            text = "--load takes precedence, as in Megatron if its folder has a checkpoint"
            draft.report("already", pretrained, text)
        return
    if start is not None:
        draft.put(pretrained, "checkpoint.load", start, _FIRST_START)
        draft.put(pretrained, "checkpoint.load_mode", "weights")
    if arguments.given("--load"):
        text = (
            "the same command resumes a run from its own folder. To continue a Megatron checkpoint "
            f"in it, add --checkpoint.load {arguments.value('--load')} --checkpoint.load_mode all"
        )
        draft.report("already", "--load", text)
    for name in (finetune, no_optim, step_flag):
        if arguments.given(name):
            draft.report("already", name, "takes effect only with --load of another folder")


_FIRST_START = "until the run has a checkpoint of its own"
"""When `checkpoint.load` is used."""


def translate_logging(draft: Draft) -> None:
    """Translate timers, experiment trackers and the level of log messages."""
    draft.copy("--timing-log-level")
    arguments, project = draft.arguments, "--wandb-project"
    if arguments.value(project):
        for flag in (project, "--wandb-exp-name", "--wandb-entity"):
            draft.copy(flag)
    else:
        for flag in ("--wandb-exp-name", "--wandb-entity"):
            if arguments.given(flag):
                draft.report("already", flag, f"takes effect only with {project}")
    level = arguments.value("--logging-level")
    if level is not None:
        names = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR"}
        name = names[min(max(level // 10 * 10, 10), 40)]
        draft.put("--logging-level", "observe.log_level", name)


def translate_measurements(draft: Draft) -> None:
    """Translate profiles, memory, energy, parameter norms and garbage collection."""
    arguments, gc_flag, interval_flag = draft.arguments, "--manual-gc", "--manual-gc-interval"
    for flag, setting in (
        ("--log-params-norm", "observe.param_norm"),
        ("--log-max-attention-logit", "observe.max_attention_logit"),
        ("--log-energy", "observe.energy"),
        ("--record-memory-history", "observe.memory_history"),
    ):
        if arguments.value(flag):
            draft.put(flag, setting, True)
    draft.copy("--log-memory-interval")
    _translate_dumps(draft)
    if arguments.value(gc_flag):
        draft.put(gc_flag, "train.gc_interval", arguments.value(interval_flag) or 100)
    elif arguments.given(interval_flag):
        draft.report("already", interval_flag, f"takes effect only with {gc_flag}")
    _translate_profile(draft)


def _translate_dumps(draft: Draft) -> None:
    """Translate dumps of weights and gradients, which have one interval."""
    flags = {"--save-params-interval": "weights", "--save-wgrads-interval": "gradients"}
    intervals = {flag: value for flag in flags if (value := draft.arguments.value(flag))}
    for flag, interval in intervals.items():
        draft.put(flag, "observe.dump.every", interval)
        draft.put(flag, f"observe.dump.{flags[flag]}", True)
    if len(set(intervals.values())) > 1:
        given = " and ".join(f"{flag} {interval}" for flag, interval in intervals.items())
        draft.problems.append(
            f"{given}: dumps have one interval, observe.dump.every. Use the same one for both."
        )


_PROFILE = (
    "--profile-step-start",
    "--profile-step-end",
    "--profile-ranks",
    "--use-pytorch-profiler",
    "--pytorch-profiler-collect-shapes",
    "--pytorch-profiler-collect-callstack",
)


def _translate_profile(draft: Draft) -> None:
    arguments = draft.arguments
    if not arguments.value("--profile"):
        for flag in _PROFILE:
            if arguments.given(flag):
                draft.report("already", flag, "takes effect only with --profile")
        return
    start, end = _PROFILE[:2]
    ranks, torch_flag = _PROFILE[2:4]
    shapes, stacks = _PROFILE[4:]
    tool = "torch" if arguments.value(torch_flag) else "nsys"
    draft.put("--profile", "profile.tool", tool)
    if arguments.given(torch_flag):
        draft.put(torch_flag, "profile.tool", tool)
    first, last = arguments.value(start), arguments.value(end)
    draft.put(start, "profile.start", first + 1)
    draft.put(end, "profile.steps", max(1, last - first), of=(start,))
    words = arguments.value(ranks) or []
    draft.problems += [
        f"{ranks} {word}: expected the numbers of ranks. Use for example {ranks} 0 1."
        for word in words
        if not word.isdigit()
    ]
    draft.put(ranks, "profile.ranks", [int(word) for word in words if word.isdigit()])
    for flag, setting in ((shapes, "profile.shapes"), (stacks, "profile.stacks")):
        if arguments.value(flag):
            draft.put(flag, setting, True)


def _translate_retention(draft: Draft) -> None:
    retain, newest = "--save-retain-interval", "--most-recent-k"
    interval, count = draft.arguments.value(retain), draft.arguments.value(newest)
    if interval is not None:
        draft.put(retain, "checkpoint.keep_every", interval)
        draft.put(retain, "checkpoint.keep", 1, "the newest is kept until the next is saved")
    elif count is not None and count > 0:
        draft.put(newest, "checkpoint.keep", count)
    else:
        draft.put(newest, "checkpoint.keep", None, "Megatron keeps every checkpoint")


# --- optimizer and precision

_LOSS_SCALE = (
    "--initial-loss-scale",
    "--min-loss-scale",
    "--loss-scale-window",
    "--hysteresis",
    "--loss-scale",
)


def translate_optimizer(draft: Draft) -> None:
    """Translate the optimizer, gradient clipping, precision and the handling of NaN gradients."""
    translate_update_rule(draft)
    draft.copy("--clip-grad")
    draft.copy("--grad-norm-skip-threshold")
    if draft.arguments.value("--log-num-zeros-in-grad"):
        draft.put("--log-num-zeros-in-grad", "optim.count_zeros", True)
    _translate_qk_clip(draft)
    _translate_decoupled_lr(draft)
    _translate_decayed_vectors(draft)
    param_map = "--dump-param-to-param-group-map"
    if draft.arguments.given(param_map):
        text = "written to parameters.jsonl in the run folder"
        draft.put(param_map, "observe.parameters", True, text)
    _translate_precision(draft)
    _translate_optimizer_states(draft)
    _translate_nonfinite_grad(draft)
    _translate_fault_detection(draft)


def _translate_qk_clip(draft: Draft) -> None:
    """Translate QK-clip, which Megatron applies after every update."""
    options = ("--qk-clip-threshold", "--qk-clip-alpha")
    if not draft.arguments.value("--qk-clip"):
        for flag in options:
            if draft.arguments.given(flag):
                draft.report("already", flag, "takes effect only with --qk-clip")
        return
    draft.put("--qk-clip", "optim.qk_clip.every", 1)
    for flag in options:
        draft.copy(flag)


def _translate_decoupled_lr(draft: Draft) -> None:
    """Translate the learning rate of the embedding and the head, which may be one parameter."""
    arguments, flag, min_flag = draft.arguments, "--decoupled-lr", "--decoupled-min-lr"
    min_lr = arguments.value(min_flag)
    if arguments.value(flag) is None:
        if arguments.given(min_flag):
            draft.report("already", min_flag, f"takes effect only with {flag}")
        return
    names: list[Plain] = ["embed.weight"]
    if not draft.settings.get("model.tied_embeddings"):
        names.append("head.weight")
    group: dict[str, Plain] = {"name": "embedding_and_output", "match": names}
    group["lr"] = arguments.value(flag)
    if min_lr is not None and draft.settings.get("schedule.style") == "constant":
        draft.report("already", min_flag, "has no effect on a constant learning rate")
    elif min_lr is not None:
        group["min_lr"] = min_lr
        draft.report("already", min_flag, f"is part of the parameter group of {flag}")
    add_parameter_group(draft, flag, group)


def _translate_decayed_vectors(draft: Draft) -> None:
    """Translate weight decay of query and key norms; of MLA Megatron decays only that of
    queries."""
    settings = draft.settings
    flags = ("--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type")
    given = [flag for flag in flags if draft.arguments.value(flag)]
    names: list[Plain] = []
    if settings.get("model.attention.qk_norm") == "head":
        names = ["*.q_norm.*", "*.k_norm.*"]
    elif settings.get("model.mla.q_rank") is not None and settings.get("model.mla.norms", True):
        names = ["*.q_down_norm.*"]
    if not names:
        for flag in given:
            draft.report("already", flag, "the model has no norms of queries and keys")
        return
    for flag in given[:1]:
        draft.put(flag, "optim.decayed_vectors", names)
    for flag in given[1:]:
        draft.report("already", flag, f"has the same meaning as {given[0]}")


def _translate_precision(draft: Draft) -> None:
    """Translate the dtype of weights and activations, and loss scaling of fp16."""
    fp16, bf16 = (bool(draft.arguments.value(flag)) for flag in ("--fp16", "--bf16"))
    if fp16 and bf16:
        draft.problems.append("--fp16 and --bf16: weights have one dtype. Use one of them.")
    if fp16:
        draft.put("--fp16", "precision.params", "fp16")
    else:
        draft.put("--bf16", "precision.params", "bf16" if bf16 else "fp32")
    for flag in _LOSS_SCALE:
        if fp16:
            draft.copy(flag)
        elif draft.arguments.given(flag):
            draft.report("already", flag, "takes effect only with --fp16")


_STATE_DTYPES = ("--exp-avg-dtype", "--exp-avg-sq-dtype")


def _translate_optimizer_states(draft: Draft) -> None:
    """Translate the dtypes of master weights and moments: with the precision-aware optimizer, bf16
    weights have remainders instead of fp32 master weights."""
    aware = "--use-precision-aware-optimizer"
    is_aware = bool(draft.arguments.value(aware))
    if is_aware and draft.arguments.value("--bf16"):
        draft.put(aware, "precision.optimizer_states.master_weights", "remainder")
    elif is_aware:
        draft.report("already", aware, "has no effect on weights that are not bf16")
    for flag in _STATE_DTYPES:
        dtype = draft.arguments.value(flag)
        if is_aware and dtype != "fp32":
            draft.copy(flag)
        elif draft.arguments.given(flag) and dtype == "fp32":
            draft.report("already", flag, "moments are fp32")
        elif draft.arguments.given(flag):
            draft.problems.append(
                f"{flag} {dtype} without {aware}: Megatron stores fp32 moments then. Add {aware}, "
                f"or remove {flag}."
            )


def _translate_nonfinite_grad(draft: Draft) -> None:
    """Translate the handling of NaN and infinite gradients: Megatron ends the run, except with
    fp16, where overflows are expected."""
    flag, setting = "--no-check-for-nan-in-loss-and-grad", "optim.nonfinite_grad"
    skip = bool(draft.arguments.value(flag))
    if not draft.arguments.value("--fp16"):
        draft.put(flag, setting, "skip" if skip else "raise")
        return
    draft.put(flag if skip else "--fp16", setting, "skip", "it reduces the loss scale")
    if draft.arguments.value("--loss-scale") is not None and not skip:
        text = "a step whose gradients overflow is skipped and counted; Megatron ends the run there"
        draft.report("explained", "--loss-scale", text)


def _translate_fault_detection(draft: Draft) -> None:
    """Translate reruns and the checks of loss and gradients."""
    mode = draft.arguments.value("--rerun-mode")
    if mode == "report_stats":
        draft.put("--rerun-mode", "fault_detector.rerun_every", 1)
        draft.put("--rerun-mode", "fault_detector.report_stats", True)
    elif mode is not None:
        action = "warn" if mode == "disabled" else "rerun"
        draft.put("--rerun-mode", "fault_detector.nonfinite", action)
    text = "a spike is above 6 robust standard deviations of the last 128 steps"
    for flag in ("--check-for-spiky-loss", "--check-for-large-grads"):
        if draft.arguments.value(flag):
            draft.put(flag, "fault_detector.spike", "rerun", text)


# --- schedules

_STYLES = {"inverse-square-root": "inverse_square_root", "WSD": "wsd"}
_WARMUP, _DECAY, _WSD_DECAY = "--lr-warmup", "--lr-decay", "--lr-wsd-decay"


def translate_schedule(draft: Draft) -> None:
    """Translate the schedules of learning rate and weight decay."""
    draft.need("--lr", "the highest learning rate")
    draft.copy("--lr")
    style = str(draft.arguments.value("--lr-decay-style"))
    draft.put("--lr-decay-style", "schedule.style", _STYLES.get(style, style))
    _reject_mixed_units(draft)
    _translate_warmup(draft)
    _translate_decay(draft, style)
    _translate_wsd(draft, style)
    _translate_weight_decay(draft)


def _reject_mixed_units(draft: Draft) -> None:
    """Report lengths in samples if the run is measured in iterations, and the reverse."""
    unit, other = ("iters", "samples") if draft.arguments.given(_ITERS) else ("samples", "iters")
    for name in (_DECAY, _WARMUP, _WSD_DECAY):
        flag = f"{name}-{other}"
        if draft.arguments.given(flag) and draft.arguments.value(flag):
            typed = draft.arguments.typed(flag)
            draft.problems.append(
                f"{typed}: this run is measured with --train-{unit}. Use {name}-{unit}."
            )


def _read_steps(draft: Draft, name: str) -> tuple[str, float] | None:
    """Return the flag and the length in steps of `--lr-decay` and similar; None if neither
    spelling was given."""
    for unit in ("iters", "samples"):
        flag = f"{name}-{unit}"
        value = draft.arguments.value(flag)
        if draft.arguments.given(flag) and value is not None:
            if unit == "iters":
                return flag, value
            schedule = _read_schedule(draft)
            if schedule.is_constant:
                return flag, value / schedule.sizes[0]
            if name != _WSD_DECAY:
                return flag, schedule.convert_to_steps(value)
            decay = draft.arguments.value(f"{_DECAY}-samples") or draft.arguments.value(_SAMPLES)
            if decay is None or value > decay:
                return flag, schedule.convert_to_steps(value)
            # the last `value` samples of the decay
            steps = schedule.convert_to_steps(decay) - schedule.convert_to_steps(decay - value)
            return flag, steps
    return None


def _put_steps(
    draft: Draft, flag: str, setting: str, steps: float, *, of: tuple[str, ...] = ()
) -> None:
    """Set a number of steps, rounded to a whole number, which is reported."""
    rounded = round(steps)
    if flag.endswith("-samples"):
        of = (*of, _GLOBAL_SETTING)
    draft.put(flag, setting, rounded, of=of)
    if setting not in draft.unsure and abs(rounded - steps) > 1e-6 * max(steps, 1.0):
        text = f"{steps:.6g} steps are rounded to {rounded}"
        draft.report("explained", flag, text, "numbers")


def _translate_warmup(draft: Draft) -> None:
    flag, init, setting = "--lr-warmup-fraction", "--lr-warmup-init", "schedule.warmup_steps"
    fraction, given = draft.arguments.value(flag), _read_steps(draft, _WARMUP)
    if fraction is not None and given is not None and given[1] > 0:
        draft.problems.append(
            f"{draft.arguments.typed(flag)} and {given[0]}: expected one of them. Remove one."
        )
    elif fraction is not None:
        decay = _read_steps(draft, _DECAY)
        length = decay[1] if decay else _read_count(draft, "train.steps")
        of = () if decay else ("train.steps",)
        _put_steps(draft, flag, setting, fraction * length, of=of)
    elif given is not None:
        _put_steps(draft, given[0], setting, given[1])
    if draft.settings.get(setting):
        draft.copy(init)
    elif draft.arguments.value(init):
        draft.report("already", init, "has no effect without warmup")


def _translate_decay(draft: Draft, style: str) -> None:
    given = _read_steps(draft, _DECAY)
    if style == "constant":
        for flag in (given[0] if given else None, "--min-lr"):
            if flag is not None and draft.arguments.given(flag) and draft.arguments.value(flag):
                text = "has no effect with --lr-decay-style constant, in Megatron too"
                draft.report("already", flag, text)
        return
    draft.copy("--min-lr")
    if given is not None and given[1] == _read_count(draft, "train.steps"):
        draft.report("already", given[0], "decay over the whole run is the default")
    elif given is not None:
        _put_steps(draft, given[0], "schedule.decay_steps", given[1])


def _translate_wsd(draft: Draft, style: str) -> None:
    given, style_flag = _read_steps(draft, _WSD_DECAY), "--lr-wsd-decay-style"
    if style == "WSD":
        draft.copy(style_flag)
        if given is not None:
            _put_steps(draft, given[0], "schedule.wsd_decay_steps", given[1])
        return
    for flag in (given[0] if given else None, style_flag):
        if flag is not None and draft.arguments.given(flag):
            draft.report("already", flag, "takes effect only with --lr-decay-style WSD")


def _translate_weight_decay(draft: Draft) -> None:
    style_flag, start, end = (
        "--weight-decay-incr-style",
        "--start-weight-decay",
        "--end-weight-decay",
    )
    draft.copy(style_flag)
    if draft.arguments.value(style_flag) != "constant":
        draft.need(start, "the first weight decay")
        draft.need(end, "the last weight decay")
        draft.copy(start)
        draft.copy(end)
        return
    draft.copy("--weight-decay")
    for flag in (start, end):
        value = draft.arguments.value(flag)
        if value is not None:
            draft.problems.append(
                f"{flag} {value}: the weight decay is constant. Remove it, or use "
                f"{style_flag} linear."
            )
