"""Table of planted faults: which part of the verification detects which fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from megalith.config.lora import LoraConfig
from megalith.config.model import (
    AttentionConfig,
    CrossConfig,
    DropoutConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    RelativeConfig,
    RopeConfig,
)
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.optim import GroupConfig, MuonConfig, OptimConfig, QkClipConfig
from megalith.config.parallel import (
    ContextConfig,
    ContextKind,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
)
from megalith.errors import RankError
from megalith.verify.faults.plant import Fault, load_faults, plant_fault
from megalith.verify.ranks import (
    STEPS,
    Difference,
    choose_micro_batch_size,
    compare_with_one_process,
    layout_case,
)
from megalith.verify.types import TrainingSettings, type_check

T = TypeVar("T")

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
class FaultResult:
    """Result of one planted fault."""

    fault: Fault
    by_types: str | None
    """Where the type check rejected it; None: not rejected."""

    numbers: Outcome
    """First wrong result of the float64 run."""

    detail: str
    """Error and parameter name."""

    @property
    def rejected(self) -> bool:
        """Whether any part of the verification detected the fault."""
        return self.by_types is not None or self.numbers != "no effect"


def judge_fault(fault: Fault) -> FaultResult:
    """Plant a fault into the smallest layout that it affects, and run type check and float64
    comparison."""
    model, parallel = smallest_layout(fault)
    world = parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    training = TrainingSettings(
        *memory_settings(fault), fault_lora_config(fault), fault_optim_config(fault)
    )
    with plant_fault(fault.name):
        problems = type_check(
            model, parallel, world=world, ranks=(world - 1,), training=training
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
        run = replace(
            case.run,
            recompute=training.recompute,
            offload=training.offload,
            lora=training.lora,
            optim=replace(training.optim, eps=case.run.optim.eps),
        )
        run = replace(run, train=replace(run.train, z_loss=0.1 if "z loss" in fault.needs else 0.0))
        differences = compare_with_one_process(
            replace(
                case,
                run=run,
                masks="alone" if "masks" in fault.needs else None,
                transient_fault="transient fault" in fault.needs,
            )
        )
        return FaultResult(fault, where, *_first_difference(differences))
    except RankError as error:
        message = str(error).split("\nthen:")[0].splitlines()[-1]
        return FaultResult(fault, where, "wrong shapes", message)


def smallest_layout(fault: Fault) -> tuple[ModelConfig, ParallelConfig]:
    """Return the smallest model and layout that the fault affects: two ranks per required axis."""
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
        positions=_choose(
            needs, {"learned positions": "learned", "biases by distance": "relative"}, "rope"
        ),
        relative=RelativeConfig(buckets=8, max_distance=9)
        if "biases by distance" in needs
        else RelativeConfig(),
    )
    kinds: dict[str, ContextKind] = {"gather": "gather", "a2a": "a2a"}
    replicas = 2 if "replicas" in needs else 1
    return with_experts(with_attention(model, fault), fault), ParallelConfig(
        tp=tp,
        cp=cp,
        dp=dp * replicas,
        pp=pp,
        pipeline=pipeline,
        sp="sp" in needs,
        zero=_choose(needs, {"fsdp": 3, "zero 2": 2, "zero": 1}, 0),
        dp_replicate=replicas,
        context=ContextConfig(kind=_choose(needs, kinds, "ring")),
        tp_comm_overlap="rings" in needs,
        ep=2 if "ep" in needs else 1,
        etp=2 if "etp" in needs else None,
    )


def _choose(needs: Sequence[str], values: Mapping[str, T], default: T) -> T:
    """Return the value of the first name in `needs`."""
    return next((value for name, value in values.items() if name in needs), default)


def with_attention(model: ModelConfig, fault: Fault) -> ModelConfig:
    """Return the model with the attention variant that the fault affects."""
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
    if "places" in fault.needs:  # large scores, so that all three position ids matter
        return replace(
            model,
            attention=replace(kind, scale=30.0),
            rope=RopeConfig(sections=(1, 1, 1), theta=2.0),
        )
    return replace(model, attention=kind)


EXPERT_NEEDS = frozenset(
    {"experts", "ep", "etp", "capacity", "balancing bias", "balancing offset", "balance over ranks"}
)
"""Requirements that imply a mixture of experts."""


def with_experts(model: ModelConfig, fault: Fault) -> ModelConfig:
    """Return the model with four experts, top-2, if the fault affects experts."""
    if not EXPERT_NEEDS & {*fault.needs}:
        return model
    biased, has_offset = "balancing bias" in fault.needs, "balancing offset" in fault.needs
    over_ranks = "balance over ranks" in fault.needs
    losses = AuxLossConfig(global_batch_coeff=0.5) if over_ranks else AuxLossConfig(batch_coeff=0.5)
    return replace(
        model,
        moe=MoEConfig(
            num_experts=4,
            ffn_hidden_size=10,
            aux_loss=AuxLossConfig(quantile=True) if has_offset else losses,
            router=RouterConfig(
                score="sigmoid" if biased else "softmax",
                expert_bias=biased,
                expert_bias_update_rate=0.01,
            ),
            capacity=CapacityConfig(factor=0.8 if "capacity" in fault.needs else None),
        ),
    )


def fault_lora_config(fault: Fault) -> LoraConfig | None:
    """Return the LoRA config that the fault affects."""
    dropped = 0.2 if "dropout" in fault.needs else 0.0
    return LoraConfig(rank=3, dropout=dropped) if "adapters" in fault.needs else None


def fault_optim_config(fault: Fault) -> OptimConfig:
    """Return the optimizer config that the fault affects, with frozen parameters or groups."""
    frozen = ("*.mlp.*",) if "frozen" in fault.needs else ()
    group = GroupConfig(name="queries", match=("*.q",), lr_scale=0.1, weight_decay=0.7)
    kinds: dict[str, Literal["sgd", "muon"]] = {"sgd": "sgd", "muon": "muon"}
    kind: Literal["adamw", "sgd", "muon"] = _choose(fault.needs, kinds, "adamw")
    return OptimConfig(
        kind=kind,
        frozen=frozen,
        groups=(group,) if "groups" in fault.needs else (),
        # of the scales, unit_rms depends most on the shape
        muon=MuonConfig(scale="unit_rms") if kind == "muon" else MuonConfig(),
        qk_clip=QkClipConfig(threshold=0.025) if "qk clip" in fault.needs else None,
    )


def memory_settings(fault: Fault) -> tuple[RecomputeConfig, OffloadConfig]:
    """Return the activation checkpointing and offload configs that the fault affects."""
    again = RecomputeConfig(granularity="full" if "recompute" in fault.needs else "none")
    return again, OffloadConfig(layers=int("offload" in fault.needs), min_numel=1)


def fault_table() -> list[FaultResult]:
    """Judge every fault; takes about a second per fault."""
    return [judge_fault(fault) for fault in load_faults()]


def as_markdown(fault_results: Sequence[FaultResult]) -> str:
    """Format fault_results as a Markdown table."""
    lines = ["| planted fault | (b) types | (d) float64 on processes |", "|---|---|---|"]
    for result in fault_results:
        types = f"rejected at `{result.by_types}`" if result.by_types else "not detected"
        numbers = f"{result.numbers}: {result.detail}" if result.detail else result.numbers
        lines.append(f"| `{result.fault.name}`: {result.fault.what} | {types} | {numbers} |")
    return "\n".join(lines)


def _first_difference(differences: Sequence[Difference]) -> tuple[Outcome, str]:
    """Return the first wrong result, in the order of `ORDER`."""
    wrong = {difference.what: difference for difference in differences if not difference.holds}
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
    "expert biases": "wrong weights after a step",
    f"weights after {STEPS} steps": "wrong weights after a step",
    "expert load": "wrong counts",
    "gradient norm against torch": "wrong update",
    "weights against torch.optim": "wrong update",
    "moments against torch.optim": "wrong update",
    "checkpoint under another layout": "wrong checkpoint",
    "reloaded weights against torch.optim": "wrong checkpoint",
}
"""Order of comparison, and the outcome that each difference means."""
