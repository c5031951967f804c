"""The planted-fault table: which part of the proof refuses which mistake."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalith.config.attention import AttentionConfig
from megalith.config.context import ContextConfig, ContextKind
from megalith.config.cross import CrossConfig
from megalith.config.dropout import DropoutConfig
from megalith.config.lora import LoraConfig
from megalith.config.mla import MLAConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.mtp import MTPConfig
from megalith.config.optim import GroupConfig, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import PipelineConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.relative import RelativeConfig
from megalith.config.rope import RopeConfig
from megalith.errors import RankError
from megalith.verify.faults import FAULTS, Fault, planted
from megalith.verify.ranks import (
    STEPS,
    Difference,
    choose_micro_batch_size,
    layout_case,
    prove_layout,
)
from megalith.verify.types import type_check

Outcome = Literal[
    "wrong shapes",
    "wrong loss",
    "wrong gradients",
    "wrong weights after a step",
    "wrong counts",
    "wrong update",
    "wrong checkpoint",
    "no effect",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault."""

    fault: Fault
    by_types: str | None
    """Where the type check refused it; None: it did not."""

    numbers: Outcome
    """The first thing that was wrong on processes in float64."""

    detail: str
    """How far off it was, and where."""

    @property
    def refused(self) -> bool:
        """Whether any part of the proof saw it."""
        return self.by_types is not None or self.numbers != "no effect"


def judge(fault: Fault) -> Verdict:
    """Plant a fault into the smallest layout in which it matters, and ask both parts of the
    proof."""
    model, parallel = smallest_layout(fault)
    world = parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    recompute, offload = memory_settings(fault)
    with planted(fault.name):
        problems = type_check(
            model,
            parallel,
            world=world,
            ranks=(world - 1,),
            recompute=recompute,
            offload=offload,
            lora=adapters_of(fault),
            optim=choice_of(fault),
        ).problems
    where = problems[0].where if problems else None
    try:
        case = layout_case(
            model,
            parallel,
            world,
            micro_batch_size=choose_micro_batch_size(parallel),
            documents="documents" in fault.needs,
            fault=fault.name,
        )
        optim = replace(choice_of(fault), eps=case.run.optim.eps)
        run = replace(
            case.run, recompute=recompute, offload=offload, lora=adapters_of(fault), optim=optim
        )
        run = replace(run, train=replace(run.train, z_loss=0.1 if "z loss" in fault.needs else 0.0))
        found = prove_layout(
            replace(case, run=run, masks="alone" if "masks" in fault.needs else None)
        )
        return Verdict(fault, where, *_first_difference(found))
    except RankError as error:
        told = str(error).split("\nthen:")[0].splitlines()[-1]
        return Verdict(fault, where, "wrong shapes", told)


def smallest_layout(fault: Fault) -> tuple[ModelConfig, ParallelConfig]:
    """Two ranks on every axis that the fault needs, and a model with what it needs."""
    needs = fault.needs
    tp, cp, dp, pp = (2 if axis in needs else 1 for axis in ("tp", "cp", "dp", "pp"))
    pp = 3 if "own stage" in needs else pp
    pipeline = PipelineConfig(
        vpp=3 if "chunks" in needs else 1,
        schedule="zb-h1" if "split backward" in needs else "auto",
        layout="Ettt|mm|L" if "own stage" in needs else None,
    )
    model = ModelConfig(
        vocab_size=61,
        pad_vocab_to_multiple_of=4,
        hidden_size=24,
        num_layers=2 if "offload" in needs else pp * pipeline.vpp,
        num_heads=4,
        num_kv_heads=1 if "shared heads" in needs else 2,
        head_dim=6,
        ffn_hidden_size=20,
        output_bias="bias" in needs,
        tied_embeddings="tied" in needs,
        dropout=DropoutConfig(
            residual=0.2 if "dropout" in needs else 0.0,
            attention=0.2 if "dropped weights" in needs else 0.0,
        ),
        mtp=MTPConfig(num_layers=2 if "own stage" in needs else int("mtp" in needs)),
        cross=CrossConfig(memory=0) if "memory" in needs else None,
        positions=(
            "learned"
            if "learned positions" in needs
            else "relative"
            if "biases by distance" in needs
            else "rope"
        ),
        relative=RelativeConfig(buckets=8, max_distance=9)
        if "biases by distance" in needs
        else RelativeConfig(),
    )
    kind: ContextKind = "gather" if "gather" in needs else "a2a" if "a2a" in needs else "ring"
    replicas = 2 if "replicas" in needs else 1
    return with_experts(with_attention(model, fault), fault), ParallelConfig(
        tp=tp,
        cp=cp,
        dp=dp * replicas,
        pp=pp,
        pipeline=pipeline,
        sp="sp" in needs,
        zero=3 if "fsdp" in needs else 2 if "zero 2" in needs else 1 if "zero" in needs else 0,
        dp_replicate=replicas,
        context=ContextConfig(kind=kind),
        tp_comm_overlap="rings" in needs,
        ep=2 if "ep" in needs else 1,
        etp=2 if "etp" in needs else None,
    )


def with_attention(model: ModelConfig, fault: Fault) -> ModelConfig:
    """The model with the kind of attention that the fault needs."""
    if "latent" in fault.needs:
        latent = MLAConfig(kv_rank=7, nope_dim=5, rope_dim=4, value_dim=3)
        return replace(model, num_kv_heads=model.num_heads, head_dim=None, mla=latent)
    kind = AttentionConfig(
        qk_norm="whole" if "whole norms" in fault.needs else "none",
        sinks="sinks" in fault.needs,
        off_by_one="off by one" in fault.needs,
        window=3 if "window" in fault.needs else None,
        chunked="chunks of documents" in fault.needs,
    )
    if "places" in fault.needs:  # scores are large enough for all three places to matter
        return replace(
            model,
            attention=replace(kind, scale=30.0),
            rope=RopeConfig(sections=(1, 1, 1), theta=2.0),
        )
    return replace(model, attention=kind)


EXPERT_NEEDS = frozenset(
    {"experts", "ep", "etp", "capacity", "balancing bias", "balancing offset", "balance over ranks"}
)
"""Of which a fault in a mixture of experts has at least one."""


def with_experts(model: ModelConfig, fault: Fault) -> ModelConfig:
    """The model with the experts that the fault needs: four, of which each token chooses two."""
    if not EXPERT_NEEDS & {*fault.needs}:
        return model
    biased, moved = "balancing bias" in fault.needs, "balancing offset" in fault.needs
    over_ranks = "balance over ranks" in fault.needs
    losses = AuxLossConfig(global_batch_coeff=0.5) if over_ranks else AuxLossConfig(batch_coeff=0.5)
    return replace(
        model,
        moe=MoEConfig(
            num_experts=4,
            ffn_hidden_size=10,
            aux_loss=AuxLossConfig(quantile=True) if moved else losses,
            router=RouterConfig(
                score="sigmoid" if biased else "softmax",
                expert_bias=biased,
                expert_bias_update_rate=0.01,
            ),
            capacity=CapacityConfig(factor=0.8 if "capacity" in fault.needs else None),
        ),
    )


def adapters_of(fault: Fault) -> LoraConfig | None:
    """The adapters that the fault needs."""
    dropped = 0.2 if "dropout" in fault.needs else 0.0
    return LoraConfig(rank=3, dropout=dropped) if "adapters" in fault.needs else None


def choice_of(fault: Fault) -> OptimConfig:
    """The optimizer that the fault needs, and the parameters that are frozen or have rates of their
    own."""
    frozen = ("*.mlp.*",) if "frozen" in fault.needs else ()
    group = GroupConfig(name="queries", match=("*.q",), lr_scale=0.1, weight_decay=0.7)
    kind: Literal["adamw", "sgd"] = "sgd" if "sgd" in fault.needs else "adamw"
    return OptimConfig(kind=kind, frozen=frozen, groups=(group,) if "groups" in fault.needs else ())


def memory_settings(fault: Fault) -> tuple[RecomputeConfig, OffloadConfig]:
    """What the fault needs to be computed again, or to wait in host memory."""
    again = RecomputeConfig(granularity="full" if "recompute" in fault.needs else "none")
    return again, OffloadConfig(layers=int("offload" in fault.needs), min_numel=1)


def fault_table() -> list[Verdict]:
    """Every fault that can be planted, judged; about a second each."""
    return [judge(fault) for fault in FAULTS]


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """A table for people."""
    lines = ["| planted fault | (b) types | (d) float64 on processes |", "|---|---|---|"]
    for verdict in verdicts:
        types = f"refused at `{verdict.by_types}`" if verdict.by_types else "not seen"
        numbers = f"{verdict.numbers}: {verdict.detail}" if verdict.detail else verdict.numbers
        lines.append(f"| `{verdict.fault.name}`: {verdict.fault.what} | {types} | {numbers} |")
    return "\n".join(lines)


def _first_difference(found: Sequence[Difference]) -> tuple[Outcome, str]:
    """The first thing that went wrong: a loss, a gradient under a loss that was right, or only what
    came of them."""
    wrong = {difference.what: difference for difference in found if not difference.holds}
    if not wrong:
        return "no effect", ""
    first = wrong[next((what for what in ORDER if what in wrong), next(iter(wrong)))]
    where = f" in `{first.name}`" if first.name else ""
    return ORDER.get(
        first.what, "wrong weights after a step"
    ), f"{first.what} off by {first.error:.0e}{where}"


ORDER: dict[str, Outcome] = {
    "first loss": "wrong loss",
    "gradients": "wrong gradients",
    "balancing biases": "wrong weights after a step",
    f"weights after {STEPS} steps": "wrong weights after a step",
    "choices of experts": "wrong counts",
    "gradient norm against torch": "wrong update",
    "weights against torch.optim": "wrong update",
    "moments against torch.optim": "wrong update",
    "checkpoint under another layout": "wrong checkpoint",
    "reloaded weights against torch.optim": "wrong checkpoint",
}
"""What is looked at first, and what it means."""
