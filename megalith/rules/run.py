"""Rules across the settings of a training run; all run before anything is built, and all failures
are reported together."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import entry_points

from megalith.config.checkpoint import checkpoint_problems
from megalith.config.data import data_problems, tokenizer_problems
from megalith.config.fault_injection import fault_injector_problems
from megalith.config.fields import range_problems
from megalith.config.lora import lora_problems
from megalith.config.observe import observe_problems, profile_problems
from megalith.config.optim import optim_problems
from megalith.config.parallel import MAX_STAGES
from megalith.config.plugins import plugin_problems
from megalith.config.replica_group import DilocoConfig, ReplicaGroupMode
from megalith.config.train import CALLBACK_GROUP, TrainRun, ema_problems, suite_problems
from megalith.errors import did_you_mean, raise_all
from megalith.launch.coordinator_protocol import parse_address
from megalith.optim.schedule import schedule_problems
from megalith.plan.batch_assignment import assign_rows, batch_problems, budget_problems
from megalith.plan.batch_schedule import (
    batch_schedule_problems,
    build_batch_schedule,
    list_batch_sizes,
)
from megalith.plan.buckets import zero_problems
from megalith.plan.context import context_problems
from megalith.plan.grid import dense_problems, divisors
from megalith.plan.kernels import explicit_backend_problems
from megalith.plan.param_groups import named_parameters, pattern_problems
from megalith.plan.qk_clip import qk_clip_problems
from megalith.plan.recompute import (
    mlp_chunks_problems,
    recompute_problems,
    shared_experts_problems,
    up_projection_problems,
)
from megalith.plan.schedule import SPLIT_SCHEDULES, pairing_problems, schedule_name
from megalith.plan.schedule import schedule_problems as pipeline_schedule_problems
from megalith.plan.shards import fully_sharded_problems
from megalith.plan.stages import plan_stages, select_rank_stages, stages_problems
from megalith.plan.state_encodings import state_encoding_problems
from megalith.plan.update_rules import list_per_matrix_rules, update_rule_problems
from megalith.rules.model import relation_problems
from megalith.rules.moe import check_single_expert_weight, expert_layout_problems

Rule = Callable[[TrainRun, int], str | None]

MOST_NAME_BYTES = 200
"""Maximum length of a run's name: most file systems allow 255 bytes, and metrics, locks and backups
add suffixes (heuristic)."""

MOST_SAMPLES = 1 << 36
"""Maximum samples of one run: their order takes half a TiB or more, and no corpus has as many
rows."""


def check_run(run: TrainRun, world: int, *, resumes: bool = False) -> None:
    """Check that a run can work on `world` ranks; `resumes`: the run has a checkpoint.

    Raises:
        ConfigError: one line for each broken rule, with a value that works.
    """
    raise_all(run_problems(run, world, resumes=resumes))


def run_problems(run: TrainRun, world: int, *, resumes: bool = False) -> list[str]:
    """Return the messages of all broken rules; rules that divide by counts run only if the counts
    are positive."""
    if run.train.uneven_batch is None and resumes:
        run = replace(run, train=replace(run.train, uneven_batch="allow"))
    p, others = run.parallel, _other_problems(run, world)
    if count_problems(run):
        return others
    fits = partial(_fits, run, frozenset(others))
    problems = (
        dense_problems(world=world, tp=p.tp, cp=p.cp, pp=p.pp, dp=p.dp, order=p.order, fits=fits)
        + others
    )
    if resumes and problems and p.dp is None and not any("processes" in text for text in problems):
        worlds = _find_nearest_worlds(run, world)
        if worlds:
            problems[-1] += f" Or use {' or '.join(map(str, worlds))} processes."
    return problems


MOST_TRIED_WORLDS = 8
"""Numbers of ranks below and above that are tried (heuristic: 0.1 s each for large models)."""


def _find_nearest_worlds(run: TrainRun, world: int) -> list[int]:
    """Return the nearest numbers of ranks below and above `world` on which no rule is broken."""
    unit = run.parallel.tp * run.parallel.cp * run.parallel.pp
    first = world // unit * unit
    below = range(first if first < world else first - unit, 0, -unit)[:MOST_TRIED_WORLDS]
    above = range(first + unit, first + (1 + MOST_TRIED_WORLDS) * unit, unit)
    nearest = (next((n for n in each if not run_problems(run, n)), 0) for each in (below, above))
    return [size for size in nearest if size]


def _fits(run: TrainRun, known: frozenset[str], degrees: Mapping[str, int], world: int) -> bool:
    """Return whether other parallel degrees on `world` ranks break no rule that is not already in
    `known`."""
    p = replace(run.parallel, tp=degrees["tp"], cp=degrees["cp"], pp=degrees["pp"])
    if p.dp is not None and p.tp * p.cp * p.pp * p.dp != world:
        return False
    return known.issuperset(_other_problems(replace(run, parallel=p), world))


def _other_problems(run: TrainRun, world: int) -> list[str]:
    """Return the messages of all broken rules, except that the degrees multiply to the world
    size."""
    p, t = run.parallel, run.train
    counts = count_problems(run)
    problems = counts + range_problems(run, kinds=(float,)) + plugin_problems(run)
    problems += batch_schedule_problems(t) + skip_problems(run) + replica_group_problems(run)
    problems += fault_detector_problems(run)
    if not counts:
        packed = t.tokens_per_microbatch is not None  # checked by budget_problems
        problems += context_problems(p, run.model, seq_len=2 * p.cp * p.tp if packed else t.seq_len)
        problems += budget_problems(t, p, run.data)
        problems += ema_problems(run)
        problems += lora_problems(run.lora, run.model, run.checkpoint, compiled=t.compile)
        problems += pattern_problems(run.optim, run.schedule, run.model, run.lora)
        problems += update_rule_problems(run.optim, run.model, run.lora)
        problems += dump_problems(run) + qk_clip_problems(run)
        if world % (p.tp * p.cp * p.pp) == 0:
            dp = p.dp or world // (p.tp * p.cp * p.pp)
            if not packed:
                problems += uneven_batch_problems(run, dp)
            problems += zero_problems(p, dp) + pipeline_problems(run, dp)
        problems += fully_sharded_problems(p, run.offload) + _relation_problems(run)
        problems += expert_layout_problems(run.model, p, world, trains=True) + pairing_problems(
            run.model, p
        )
        problems += [text for rule in RULES if (text := rule(run, world)) is not None]
        problems += recompute_problems(
            run.recompute,
            run.offload,
            tp=p.tp,
            sp=p.sp,
            compiled=t.compile,
            stage_layers=smallest_stage(run),
        )
        problems += shared_experts_problems(run.recompute, run.model)
        problems += up_projection_problems(run.recompute, run.model)
        problems += mlp_chunks_problems(
            run.recompute,
            run.offload,
            run.model,
            tokens=(t.tokens_per_microbatch or t.micro_batch_size * t.seq_len // p.cp)
            // (p.tp if p.sp else 1),
            adapters_drop=run.lora is not None and run.lora.dropout > 0,
        )
    return (
        problems
        + optim_problems(run.optim, run.precision)
        + state_encoding_problems(run.optim, run.precision)
        + schedule_problems(run.schedule, _steps_to_plan_with(run))
        + data_problems(run.data)
        + checkpoint_problems(run.checkpoint)
        + tokenizer_problems(run.tokenizer)
        + observe_problems(run.observe)
        + suite_problems(run)
        + profile_problems(run.profile, steps=t.steps, world=world)
        + fault_injector_problems(
            run.fault_injector,
            steps=t.steps,
            world=world,
            saves={
                "save": bool(run.checkpoint.every or run.checkpoint.local.every),
                "evaluate": bool(t.eval_every and t.eval_steps),
            },
        )
    )


def uneven_batch_problems(run: TrainRun, dp: int) -> list[str]:
    """Return the messages of global batch sizes that do not divide over `dp` ranks, unless
    train.uneven_batch allows them."""
    t, is_ordered = run.train, run.data.sampler == "sequential"
    problems = []
    for setting, size in list_batch_sizes(t):
        texts = batch_problems(
            global_batch_size=size, micro_batch_size=t.micro_batch_size, dp=dp, setting=setting
        )
        if not texts or (t.uneven_batch == "allow" and is_ordered):
            continue
        if is_ordered:
            idle = assign_rows(run, size, dp).describe_idle_ranks()
            texts.append(f"Or set train.uneven_batch=allow, which costs: {idle}.")
        elif t.uneven_batch == "allow":
            texts.append(
                f"train.uneven_batch=allow needs data.sampler=sequential: {run.data.sampler} "
                "shuffles whole groups of train.micro_batch_size · dp samples."
            )
        problems.append(" ".join(texts))
    return problems


GROUP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Ids of replica groups: they occur in messages and on the status page."""


def replica_group_problems(run: TrainRun) -> list[str]:
    """Return the messages of settings that do not work with replica groups."""
    group, t = run.replica_group, run.train
    if group is None:
        return []
    problems = []
    try:
        parse_address(group.coordinator)
    except ValueError as error:
        problems.append(f"replica_group.coordinator: {error}.")
    if not GROUP_ID.fullmatch(group.id):
        problems.append(
            f"replica_group.id={group.id!r:.100} is not an id. Use up to 63 letters, digits, dots, "
            "dashes and underscores, for example replica_group.id=a."
        )
    if group.max_groups is not None and group.max_groups < group.min_groups:
        problems.append(
            f"replica_group.max_groups={group.max_groups} is smaller than replica_group.min_groups="
            f"{group.min_groups}. Set replica_group.max_groups to {group.min_groups} or more."
        )
    if group.mode == "diloco":
        problems += _diloco_problems(group.diloco)
    if group.timeout_seconds >= run.parallel.timeout_seconds:
        problems.append(
            f"replica_group.timeout_seconds={group.timeout_seconds:g} is not shorter than "
            f"parallel.timeout_seconds={run.parallel.timeout_seconds:g}, after which the ranks of "
            "this group end. Set replica_group.timeout_seconds to "
            f"{run.parallel.timeout_seconds / 2:g}."
        )
    changes = {
        f"data.sampler={run.data.sampler}": (
            "data.sampler=sequential",
            run.data.sampler != "sequential",
        ),
        "train.balance_rows=true": ("train.balance_rows=false", t.balance_rows),
    }
    problems += [
        f"{setting} with replica_group: the samples of a step are divided over the groups in their "
        f"order, also if a group is lost in the middle of the step. Set {other}."
        for setting, (other, applies) in changes.items()
        if applies
    ]
    problems += _replicated_router_problems(run, group.mode)
    return problems + _fault_action_problems(run, group.mode)


def _fault_action_problems(run: TrainRun, mode: ReplicaGroupMode) -> list[str]:
    """Return the messages of actions on faults that replica groups cannot execute.

    A rollback would take back steps, or rounds of DiLoCo, that other groups have committed; a rerun
    of summed gradients would compare the ranks of one group only.
    """
    detector, is_sync = run.fault_detector, mode == "sync"
    reruns = ("rerun",) if is_sync else ()
    intervals = (detector.rerun_every,) if is_sync and detector.rerun_every else ()
    actions = {
        "nonfinite": (detector.nonfinite, ("rollback",), "skip"),
        "spike": (detector.spike, ("rollback", *reruns), "skip"),
        "model_fault": (detector.model_fault, ("rollback",), "skip"),
        "rerun_every": (detector.rerun_every, intervals, "0"),
    }
    reason = "a step of several groups is neither repeated nor rolled back"
    if not is_sync:
        reason = "a group cannot take back the rounds that the others have applied"
    return [
        f"fault_detector.{name}={value} with replica_group: {reason}. Set "
        f"fault_detector.{name}={other}."
        for name, (value, rejected, other) in actions.items()
        if value in rejected
    ]


def _diloco_problems(diloco: DilocoConfig) -> list[str]:
    """Return the messages of DiLoCo's fragments."""
    name, every = "replica_group.diloco", diloco.sync_every
    if diloco.num_fragments > every:
        return [
            f"{name}.num_fragments={diloco.num_fragments} with {name}.sync_every={every}: at most "
            f"one fragment is synchronized after a step. Set {name}.num_fragments to at most "
            f"{every}."
        ]
    distance = every // diloco.num_fragments
    if diloco.fragment_delay >= distance:
        return [
            f"{name}.fragment_delay={diloco.fragment_delay}: the next fragment is sent after "
            f"{distance} steps ({name}.sync_every={every} / num_fragments={diloco.num_fragments}), "
            f"before this one is applied. Set {name}.fragment_delay to at most {distance - 1}."
        ]
    return []


def _replicated_router_problems(run: TrainRun, mode: ReplicaGroupMode) -> list[str]:
    """Return the messages of router settings whose statistics replica groups do not sum."""
    moe, problems = run.model.moe, []
    if moe is None:
        return []
    coeff, name = moe.aux_loss.global_batch_coeff, "model.moe.aux_loss"
    if mode == "sync" and coeff > 0:
        problems.append(
            f"{name}.global_batch_coeff={coeff} with replica_group: every layer would exchange its "
            "expert load with the other groups in the forward pass of each microbatch, and the "
            f"loss would depend on their number. Set {name}.global_batch_coeff=0, for example with "
            f"{name}.batch_coeff={coeff} or model.moe.router.expert_bias=true."
        )
    updated = {
        "model.moe.router.expert_bias": moe.router.expert_bias,
        f"{name}.quantile": moe.aux_loss.quantile,
    }
    problems += [
        f"{setting}=true with replica_group.mode=diloco: it changes in every step by the expert "
        "load of one group, and only weights are synchronized, so that it would differ between the "
        f"groups. Set {setting}=false, or replica_group.mode=sync."
        for setting, applies in updated.items()
        if applies and mode == "diloco"
    ]
    return problems


def fault_detector_problems(run: TrainRun) -> list[str]:
    """Return the messages of fault_detector: each action can be executed."""
    config, checkpoint, problems = run.fault_detector, run.checkpoint, []
    if config.nonfinite == "skip" and run.optim.nonfinite_grad == "raise":
        problems.append(
            "fault_detector.nonfinite=skip with optim.nonfinite_grad=raise: a gradient that is not "
            "finite cannot both be skipped and end the run. Set optim.nonfinite_grad=skip, or "
            "fault_detector.nonfinite=stop."
        )
    actions = {"nonfinite": config.nonfinite, "spike": config.spike}
    if config.uses_reruns:
        actions["model_fault"] = config.model_fault
    names = [f"fault_detector.{name}" for name, action in actions.items() if action == "rollback"]
    if not names:
        return problems
    action, steps = f"{' and '.join(names)}=rollback", run.train.steps
    if not 0 < checkpoint.every < steps and steps > 1:
        problems.append(
            f"{action} with checkpoint.every={checkpoint.every}: no step before the last is saved, "
            f"so there is no checkpoint to return to. Set checkpoint.every to a number from 1 to "
            f"{steps - 1}."
        )
    if config.max_rollbacks == 0:
        problems.append(
            f"{action} with fault_detector.max_rollbacks=0: no rollback is allowed. Set "
            f"fault_detector.max_rollbacks=3, or {names[0]}=stop."
        )
    if not checkpoint.save_optimizer:
        problems.append(
            f"{action} with checkpoint.save_optimizer=false: a rollback would lose the optimizer "
            f"state. Set checkpoint.save_optimizer=true, or {names[0]}=skip."
        )
    return problems


def skip_problems(run: TrainRun) -> list[str]:
    """Return the messages of train.skip_steps: each is a step of the run, and not all are."""
    steps, skipped = run.train.steps, set(run.train.skip_steps)
    outside = sorted(step for step in skipped if not 1 <= step <= steps)
    if outside:
        return [
            f"train.skip_steps={list(run.train.skip_steps)}: {', '.join(map(str, outside[:5]))} "
            f"{'is no step' if len(outside) == 1 else 'are no steps'} of the run. Use numbers from "
            f"1 to train.steps={steps}."
        ]
    if len(skipped) >= max(steps, 1):
        return [
            f"train.skip_steps names all {steps} steps of the run, so nothing would be trained. "
            "Leave at least one of them out."
        ]
    return []


def dump_problems(run: TrainRun) -> list[str]:
    """Return the messages of patterns of observe.dump.only that match no parameter."""
    if not run.observe.dump.only:
        return []
    names = [each.name for each in named_parameters(run.model, run.lora)]
    return [
        f"observe.dump.only={pattern}: matches no parameter.{did_you_mean(pattern, names)} Use for "
        f"example {names[0]}."
        for pattern in run.observe.dump.only
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def pipeline_problems(run: TrainRun, dp: int) -> list[str]:
    """Return the broken rules of pipeline stages and schedule; none with one chunk on one rank."""
    p, t = run.parallel, run.train
    if p.pp * p.pipeline.vpp == 1:
        return []
    problems = stages_problems(
        p.pipeline, pp=p.pp, num_layers=run.model.num_layers, depths=run.model.mtp.num_layers
    )
    if t.tokens_per_microbatch is not None or t.uneven_batch == "allow":
        # empty microbatches are added until their number fits the schedule
        most = 4 * max(p.pipeline.group or p.pp, p.pp)
        return problems + pipeline_schedule_problems(p.pipeline, pp=p.pp, num_microbatches=most)
    rows = t.micro_batch_size * dp
    for setting, size in list_batch_sizes(t):
        if size % rows:
            continue  # another rule fails
        for text in pipeline_schedule_problems(
            p.pipeline, pp=p.pp, num_microbatches=size // rows, rows=rows, setting=setting
        ):
            is_scheduled = bool(t.batch_size_schedule) and f"{setting} to" in text
            problems.append(f"{setting}={size}: {text}" if is_scheduled else text)
    return list(dict.fromkeys(problems))


def smallest_stage(run: TrainRun) -> int:
    """Return the layers of the smallest nonempty pipeline stage; of the model if the stages are
    invalid."""
    pipeline, pp, layers, depths = (
        run.parallel.pipeline,
        run.parallel.pp,
        run.model.num_layers,
        run.model.mtp.num_layers,
    )
    if pp * pipeline.vpp == 1 or stages_problems(pipeline, pp=pp, num_layers=layers, depths=depths):
        return layers
    counts = [
        len(stage.layers)
        for stage in plan_stages(pipeline, pp=pp, num_layers=layers, depths=depths)
    ]
    return min(count for count in counts if count)


def _relation_problems(run: TrainRun, *, trains: bool = True) -> list[str]:
    """Return the model settings that contradict each other.

    For a model that is loaded, the weight of a single chosen expert is not checked, because another
    setting would change its outputs (`balance_notes` reports it).
    """
    moe, learned = run.model.moe, run.checkpoint.load is not None
    allowed = check_single_expert_weight(moe) if learned and moe is not None else None
    return [text for text in relation_problems(run.model, trains=trains) if text != allowed]


def model_problems(run: TrainRun, *, trains: bool = True) -> list[str]:
    """Return the broken rules of the model and its layout, for commands that read no data;
    `trains`: as in `network_problems`."""
    problems = count_problems(run)
    if not problems:
        layout = (text for rule in LAYOUT_RULES if (text := rule(run, run.parallel.tp)) is not None)
        problems = [*_relation_problems(run, trains=trains), *layout]
    return problems + range_problems(run.model, "model", kinds=(float,))


def _steps_to_plan_with(run: TrainRun) -> int:
    """Return the run's steps; if they are invalid, enough steps for the schedule, whose rules then
    do not fail too."""
    schedule = run.schedule
    warmup = schedule.warmup_steps if isinstance(schedule.warmup_steps, int) else 0
    enough = max(warmup, 0) + max(schedule.wsd_decay_steps or 0, 0) + 100
    return run.train.steps if run.train.steps >= 1 else enough


def count_problems(run: TrainRun) -> list[str]:
    """Return the messages about whole numbers out of their range; other rules divide by them, and
    plans list their elements."""
    pp, vpp = run.parallel.pp, run.parallel.pipeline.vpp
    most = max(MAX_STAGES // max(pp, 1), 1)
    problems = range_problems(run, kinds=(int,))
    if vpp > most:
        problems.append(
            f"parallel.pipeline.vpp={vpp} must be at most {most} with parallel.pp={pp}, which is "
            f"{MAX_STAGES} model chunks. Set parallel.pipeline.vpp to {most} or less."
        )
    return problems


def check_run_name(run: TrainRun, world: int) -> str | None:
    """The run's name is a folder name under runs/, without path separators."""
    name = run.name
    leads_elsewhere = set(name) <= {"."} or "/" in name or "\\" in name
    if not leads_elsewhere and name.isprintable() and len(name.encode()) <= MOST_NAME_BYTES:
        return None
    return (
        f"name={name!r:.60} cannot be the name of a folder under runs/: it must have 1 to "
        f"{MOST_NAME_BYTES} bytes of printable characters without / and \\, and not only dots. Set "
        "name to one such as my_run; to train in another folder, pass --run with its path."
    )


def check_kv_heads_fit_tp(run: TrainRun, world: int) -> str | None:
    """Each tensor-parallel rank has whole KV heads, or each KV head is replicated on equally many
    ranks."""
    keys, tp, heads = run.model.num_kv_heads, run.parallel.tp, run.model.num_heads
    if tp <= keys or (tp % keys == 0 and tp <= heads):
        return None
    fits = sorted({*range(1, min(keys, 16) + 1), *(n for n in divisors(heads) if n % keys == 0)})
    return (
        f"parallel.tp={tp} does not fit model.num_kv_heads={keys} (model.num_heads={heads}): a "
        "rank needs whole KV heads, or each KV head is replicated on an equal number of ranks. Set "
        f"parallel.tp to one of {fits}."
    )


def check_every_rank_has_features(run: TrainRun, world: int) -> str | None:
    """Each tensor-parallel rank has a nonempty shard of every weight."""
    tp, rows, own = run.parallel.tp, run.model.padded_vocab_size(), run.model.layers.ffn_hidden_size
    name, features = (
        ("layers.ffn_hidden_size", min(own))
        if own
        else ("ffn_hidden_size", run.model.ffn_hidden_size)
    )
    if tp <= min(features, rows):
        return None
    return (
        f"parallel.tp={tp} is more than model.{name}={features} or the {rows} rows of the "
        f"vocabulary. Set parallel.tp to at most {min(features, rows)}."
    )


def check_kv_head_replication_is_uniform(run: TrainRun, world: int) -> str | None:
    """KV heads are replicated in every layer or in none."""
    keys, tp = run.model.layers.num_kv_heads, run.parallel.tp
    if not keys or tp <= min(keys) or min(keys) == max(keys):
        return None
    return (
        f"parallel.tp={tp} with model.layers.num_kv_heads={list(keys)}: KV heads would be "
        f"replicated in some layers and not in others. Set parallel.tp to {min(keys)} or less."
    )


def check_sp_needs_tp(run: TrainRun, world: int) -> str | None:
    """Sequence parallelism shards tokens over the tensor-parallel ranks."""
    if not run.parallel.sp or run.parallel.tp > 1:
        return None
    return (
        "parallel.sp=true needs parallel.tp > 1, over which it shards tokens. Set parallel.tp to "
        "2, or remove parallel.sp."
    )


def check_tp_comm_overlap_needs_sp(run: TrainRun, world: int) -> str | None:
    """Tensor-parallel communication overlap needs sequence parallelism and overlap."""
    p = run.parallel
    if not p.tp_comm_overlap or (p.sp and p.overlap):
        return None
    return (
        "parallel.tp_comm_overlap=true needs parallel.sp=true and parallel.overlap=true (now "
        f"sp={p.sp}, overlap={p.overlap}): the collective matmul exchanges sequence-parallel "
        "shards of the tokens. Set both, or remove parallel.tp_comm_overlap."
    )


def check_fused_collective_matmul(run: TrainRun, world: int) -> str | None:
    """Fused collective matmuls are part of tensor-parallel communication overlap."""
    p = run.parallel
    if p.tp_comm_overlap or p.collective_matmul != "fused":
        return None
    return (
        f"parallel.collective_matmul={p.collective_matmul} with parallel.tp_comm_overlap=false has "
        "no effect. Set parallel.tp_comm_overlap=true, or parallel.collective_matmul=auto."
    )


def check_sp_divides_tokens(run: TrainRun, world: int) -> str | None:
    """Sequence parallelism needs equally many tokens on each rank; with cp `context_problems`
    checks this."""
    tp, rows, length = run.parallel.tp, run.train.micro_batch_size, run.train.seq_len
    packed = run.train.tokens_per_microbatch is not None
    if not run.parallel.sp or run.parallel.cp > 1 or packed or rows * length % tp == 0:
        return None
    return (
        f"train.micro_batch_size * train.seq_len = {rows} * {length} = {rows * length} tokens do "
        f"not divide over parallel.tp={tp} ranks with parallel.sp=true. Set train.seq_len to "
        f"{-(-length // tp) * tp} or train.micro_batch_size to {-(-rows // tp) * tp}."
    )


def check_seq_len(run: TrainRun, world: int) -> str | None:
    """train.seq_len is at most the model's context length."""
    length, limit = run.train.seq_len, run.model.max_seq_len
    if length <= limit:
        return None
    return (
        f"train.seq_len={length} is more than model.max_seq_len={limit}. Set train.seq_len to "
        f"{limit} or less."
    )


def check_seq_len_fits_mtp(run: TrainRun, world: int) -> str | None:
    """A row has tokens for every MTP depth."""
    length, depths = run.train.seq_len, run.model.mtp.num_layers
    if depths < length:
        return None
    return (
        f"train.seq_len={length} with model.mtp.num_layers={depths}: the deepest prediction is "
        f"{depths + 1} tokens ahead, beyond every row. Set train.seq_len to {depths + 1} or more, "
        f"or model.mtp.num_layers to {length - 1} or less."
    )


def check_compile_without_tp_and_cp(run: TrainRun, world: int) -> str | None:
    """Compiled layers contain no collectives."""
    axes = [
        f"parallel.{axis}={size}"
        for axis in ("tp", "cp")
        if (size := getattr(run.parallel, axis)) > 1
    ]
    if not run.train.compile or not axes:
        return None
    return (
        f"train.compile=true with {' and '.join(axes)}: only layers without tensor or context "
        "parallelism can be compiled. Set train.compile=false, or the degrees to 1."
    )


def check_compile_without_experts(run: TrainRun, world: int) -> str | None:
    """Compiled layers have no experts, since each token count would be compiled separately."""
    if not run.train.compile or run.model.moe is None:
        return None
    return (
        f"train.compile=true with model.moe of {run.model.moe.num_experts} experts: the number of "
        "tokens per expert changes in every step, which compiled layers do not support. Set "
        "train.compile=false."
    )


def check_compile_without_split_backward(run: TrainRun, world: int) -> str | None:
    """A compiled layer computes weight gradients and input gradients together."""
    pipeline = run.parallel.pipeline
    name = schedule_name(pipeline)
    if not run.train.compile or run.parallel.pp * pipeline.vpp == 1 or name not in SPLIT_SCHEDULES:
        return None
    return (
        f"train.compile=true with parallel.pipeline.schedule={name}: this schedule defers weight "
        "gradients, and a compiled layer computes weight and input gradients together. Set "
        "parallel.pipeline.schedule to one of gpipe, 1f1b, interleaved, or train.compile=false."
    )


def check_zero3_chunks_share_no_table(run: TrainRun, world: int) -> str | None:
    """With parallel.zero=3, model chunks are sharded separately, so the chunks of a rank cannot
    share a table."""
    p, layers, depths = run.parallel, run.model.num_layers, run.model.mtp.num_layers
    alone = world // p.tp <= 1
    if p.zero != 3 or alone or p.pipeline.vpp == 1 or min(p.pp, p.pipeline.vpp) < 1:
        return None
    if stages_problems(p.pipeline, pp=p.pp, num_layers=layers, depths=depths):
        return None  # reported by another rule
    stages = plan_stages(p.pipeline, pp=p.pp, num_layers=layers, depths=depths)
    ranks = [select_rank_stages(stages, rank, p.pipeline, pp=p.pp) for rank in range(p.pp)]
    biased = any(sum(chunk.reads_biases(run.model) for chunk in chunks) > 1 for chunks in ranks)
    if not biased and not any(
        sum(chunk.reads_table(run.model) for chunk in chunks) > 1 for chunks in ranks
    ):
        return None
    if biased:
        return (
            f"parallel.zero={p.zero} with parallel.pipeline.vpp={p.pipeline.vpp} and "
            "model.positions=relative: the chunks of a rank share one table of biases, and each "
            "chunk is sharded separately. Set parallel.pipeline.vpp=1, or parallel.zero=2."
        )
    cause = (
        "tied_embeddings=true"
        if run.model.tied_embeddings
        else f"mtp.num_layers={run.model.mtp.num_layers}"
    )
    return (
        f"parallel.zero={p.zero} with parallel.pp={p.pp}, parallel.pipeline.vpp={p.pipeline.vpp} "
        f"and model.{cause}: two chunks of a rank share the embedding table, and each chunk is "
        "sharded separately. Set parallel.pipeline.vpp=1, or parallel.zero=2."
    )


def check_eval_steps(run: TrainRun, world: int) -> str | None:
    """train.eval_every needs train.eval_steps."""
    if not run.train.eval_every or run.train.eval_steps > 0:
        return None
    return (
        f"train.eval_every={run.train.eval_every} but train.eval_steps=0: set train.eval_steps to "
        "10, or remove train.eval_every."
    )


def check_best_metric(run: TrainRun, world: int) -> str | None:
    """checkpoint.best_metric is a metric of an evaluation whose steps are saved."""
    metric, every = run.checkpoint.best_metric, run.checkpoint.every
    if metric is None:
        return None
    intervals = {name: suite.every for name, suite in run.evaluate.items()}
    if run.train.eval_steps > 0:
        intervals["eval"] = run.train.eval_every
    suites = [name for name in intervals if metric.startswith(f"{name}_")]
    if not suites:
        choices = [name for name, suite in run.evaluate.items() if suite.kind == "choice"]
        listed = [f"{name}_{'acc' if name in choices else 'loss'}" for name in intervals]
        advice = f"Use one of {listed}" if listed else "Set train.eval_steps=10 and eval_loss"
        return (
            f"checkpoint.best_metric={metric} is not a metric of an evaluation of this run. "
            f"{advice}, or remove checkpoint.best_metric."
        )
    suite = max(suites, key=len)
    interval = intervals[suite] or 0
    if interval and every and math.lcm(interval, every) < run.train.steps:
        return None
    setting = "train.eval_every" if suite == "eval" else f"evaluate.{suite}.every"
    return (
        f"checkpoint.best_metric={metric}: with {setting}={interval} and checkpoint.every={every}, "
        f"no step before the last is both evaluated and saved. Set {setting} to the value of "
        f"checkpoint.every, for example both to {max(1, run.train.steps // 10)}."
    )


def check_weight_decay(run: TrainRun, world: int) -> str | None:
    """A step of decoupled weight decay does not increase weights."""
    schedule, optim = run.schedule, run.optim
    rules = {optim.kind, optim.scalar_optimizer, *(group.kind for group in optim.groups)}
    decoupled = optim.decoupled_weight_decay or bool(rules - {"adamw", None})
    names = {
        "weight_decay": schedule.weight_decay,
        "end_weight_decay": schedule.end_weight_decay or 0.0,
    }
    name, decay = max(names.items(), key=lambda item: item[1])
    product = schedule.lr * decay
    if not decoupled or range_problems(schedule) or product <= 2:
        return None
    return (
        f"schedule.{name}={decay} with schedule.lr={schedule.lr}: each step multiplies weights by "
        f"1 - lr * decay = {1 - product:g}, so that they grow without bound. Set schedule.{name} "
        f"to {2 / schedule.lr:g} or less."
    )


def check_explicit_backends(run: TrainRun, world: int) -> str | None:
    """Kernel backends that are selected by name support the model; devices are checked when the
    model is built."""
    return " ".join(explicit_backend_problems(run)) or None


def check_sft_tokenizer(run: TrainRun, world: int) -> str | None:
    """Chat templates need a tokenizer of text."""
    kind = run.tokenizer.kind
    if not run.data.sft.used() or kind != "null":
        return None
    return (
        f"tokenizer.kind={kind} with data.sft: conversations are text, which this tokenizer cannot "
        "encode. Set tokenizer.kind to byte, or to huggingface with tokenizer.path."
    )


def check_num_samples(run: TrainRun, world: int) -> str | None:
    """The order of all samples of a run, built before its first step, fits into memory."""
    if batch_schedule_problems(run.train):
        return None
    steps, schedule = run.train.steps, build_batch_schedule(run.train)
    total = schedule.count_samples(steps)
    if total <= MOST_SAMPLES:
        return None
    product = (
        f"train.steps={steps} of the sizes of train.batch_size_schedule"
        if run.train.batch_size_schedule
        else f"train.steps={steps} * train.global_batch_size={run.train.global_batch_size}"
    )
    return (
        f"{product} = {total} samples is more "
        f"than {MOST_SAMPLES} (2**36): the order of all samples is built first, at 8 bytes each or "
        f"more. Set train.steps to {max(schedule.count_steps(MOST_SAMPLES), 1)} or less."
    )


def check_lr_scaling_has_schedule(run: TrainRun, world: int) -> str | None:
    """Scaling of the learning rate with the batch size needs a batch size that changes."""
    scaling = run.schedule.scale_lr_with_batch_size
    if scaling == "none" or run.train.batch_size_schedule:
        return None
    return (
        f"schedule.scale_lr_with_batch_size={scaling} has no effect without "
        "train.batch_size_schedule: all steps have the same batch size. Set it to none, or set "
        "train.batch_size_schedule."
    )


def check_routing_trace_has_experts(run: TrainRun, world: int) -> str | None:
    """A routing trace needs a model with routers."""
    if run.observe.routing_trace <= 0 or run.model.moe is not None:
        return None
    return (
        f"observe.routing_trace={run.observe.routing_trace} with model.moe=null: the model has no "
        "experts. Set model.moe, or observe.routing_trace=0."
    )


def check_routing_captures_have_trace(run: TrainRun, world: int) -> str | None:
    """Routing captures need a routing trace."""
    captures, steps = run.observe.routing_captures, run.observe.routing_trace
    if not captures or steps > 0:
        return None
    return (
        f"observe.routing_captures=[{', '.join(captures)}] with observe.routing_trace={steps}: "
        "captures are written with a routing trace. Set observe.routing_trace=1 or more, or "
        "observe.routing_captures=[]."
    )


def check_per_layer_metrics(run: TrainRun, world: int) -> str | None:
    """Metrics per layer are metrics of experts."""
    if not run.observe.per_layer or run.model.moe is not None:
        return None
    return (
        f"observe.per_layer={str(run.observe.per_layer).lower()} with model.moe=null: these "
        "metrics are of experts. Set model.moe, or observe.per_layer=false."
    )


def check_loss_plugin_options(run: TrainRun, world: int) -> str | None:
    """A loss plug-in replaces cross-entropy, with all options of it."""
    train = run.train
    options = {
        "train.label_smoothing": (train.label_smoothing, 0.0),
        "train.z_loss": (train.z_loss, 0.0),
        "train.loss_chunk": (train.loss_chunk, None),
        "train.loss_backward": (train.loss_backward, "kept"),
        "observe.max_logit": (run.observe.max_logit, False),
    }
    used = [f"{name}={value}" for name, (value, default) in options.items() if value != default]
    if train.loss_plugin is None or not used:
        return None
    return (
        f"train.loss_plugin={train.loss_plugin} with {', '.join(used)}: these options belong to "
        "the built-in loss. Remove them, or train.loss_plugin."
    )


def check_callbacks_are_installed(run: TrainRun, world: int) -> str | None:
    """Callbacks in the settings are entry points: a settings file imports no other code."""
    if not run.train.callbacks:
        return None
    installed = sorted(point.name for point in entry_points(group=CALLBACK_GROUP))
    unknown = next((name for name in run.train.callbacks if name not in installed), None)
    if unknown is None:
        return None
    if ":" in unknown:
        return (
            f"train.callbacks={unknown}: settings may only name callbacks of installed packages "
            f"(entry points of the group {CALLBACK_GROUP}), so that a file imports no code. Name "
            f"the class on the command line: --callback {unknown}."
        )
    return (
        f"train.callbacks={unknown} is not an installed callback."
        f"{did_you_mean(unknown, installed)} Use one of the entry points of the group "
        f"{CALLBACK_GROUP} ({', '.join(installed) or 'none is installed'}), or install the package "
        "that provides it."
    )


def check_bucket_alignment_has_matrix_rule(run: TrainRun, world: int) -> str | None:
    """Check that an update rule needs the whole matrices to which buckets are aligned."""
    alignment, optim = run.parallel.bucket_alignment, run.optim
    if alignment == "none" or optim.plugin is not None or list_per_matrix_rules(optim):
        return None
    return (
        f"parallel.bucket_alignment={alignment} with optim.kind={optim.kind}: no update rule needs "
        "whole matrices, so padding would be wasted. Set parallel.bucket_alignment=none, or "
        "optim.kind=muon."
    )


LAYOUT_RULES: tuple[Rule, ...] = (
    check_kv_heads_fit_tp,
    check_kv_head_replication_is_uniform,
    check_every_rank_has_features,
    check_sp_needs_tp,
    check_tp_comm_overlap_needs_sp,
    check_fused_collective_matmul,
)
RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    check_run_name,
    check_sp_divides_tokens,
    check_seq_len,
    check_seq_len_fits_mtp,
    check_compile_without_tp_and_cp,
    check_compile_without_experts,
    check_compile_without_split_backward,
    check_loss_plugin_options,
    check_explicit_backends,
    check_zero3_chunks_share_no_table,
    check_eval_steps,
    check_best_metric,
    check_bucket_alignment_has_matrix_rule,
    check_weight_decay,
    check_num_samples,
    check_lr_scaling_has_schedule,
    check_sft_tokenizer,
    check_routing_trace_has_experts,
    check_routing_captures_have_trace,
    check_per_layer_metrics,
    check_callbacks_are_installed,
)
