"""A trained model with its tokenizer, ready to write."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalith.checkpoint.boxes import CheckpointEntry
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.kernels import Kernel
from megalith.config.model import ModelConfig
from megalith.config.mtp import MTPConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError, DataError, raise_all
from megalith.models.decoder import Decoder, allocate, declared_parameters
from megalith.models.pretrained import (
    Pretrained,
    fill_from,
    locate,
    open_pretrained,
    require_adapters,
)
from megalith.models.release import release_run
from megalith.nn.kernels import use_kernels
from megalith.nn.mlp import read_prompts_in_chunks
from megalith.parallel.mesh import Mesh
from megalith.plan.experts import expert_layout_problems
from megalith.plan.grid import divisors
from megalith.train.rules import key_value_heads_fit, model_problems

MTP_PARAMETERS = ("mtp.*",)
"""Parameters of MTP layers than the next token."""


@dataclass(frozen=True, slots=True)
class TextGenerator:
    """What writing text needs."""

    model: Decoder
    tokenizer: Tokenizer
    stops: frozenset[int]
    """PackedSeqParams that end a text."""


def open_source(source: str, tp: int, *, base: str | None = None) -> Pretrained:
    """The model that a person means, which must be one that `tp` ranks can share; `base`: of
    adapters that moved away from theirs.

    Raises:
        CheckpointError: there is none, or it is damaged. ConfigError: the ranks are too many, or do
        not fit its heads; or there is a base and no adapters.
    """
    opened = open_pretrained(locate(source), base=base)
    if base is not None:
        require_adapters(opened, base)
    raise_all(_model_problems(opened, 1) + writing_problems(opened.model))
    if problems := _model_problems(opened, tp):
        heads = opened.model.num_heads
        counts = sorted({*range(1, min(heads, 16) + 1), *divisors(heads)})
        fits = ", ".join(str(count) for count in counts if not _model_problems(opened, count))
        raise ConfigError(
            f"--nproc={tp}: so many processes cannot share {opened.path}: "
            f"{_why_not(opened, tp, problems[0])}. "
            f"Set --nproc to one of {fits}."
        )
    return opened


def _model_problems(opened: Pretrained, tp: int) -> list[str]:
    """What is wrong with a model, or with sharing it among so many ranks."""
    run = _run(opened, tp)
    problems = model_problems(run, trains=False)
    return problems or expert_layout_problems(opened.model, run.parallel, tp, trains=False)


def _run(opened: Pretrained, tp: int) -> TrainRun:
    run = release_run("generate", opened.model, opened.tokenizer, opened.path)
    return replace(run, parallel=writing_layout(opened.model, tp))


def _why_not(opened: Pretrained, tp: int, problem: str) -> str:
    """What keeps so many ranks from sharing a model: its heads, or what a rule of layouts says,
    in other words than those of a run's settings, which nobody set here."""
    if key_value_heads_fit(_run(opened, tp), tp) is not None:
        return (
            f"each has whole key/value heads of model.num_heads={opened.model.num_heads} and "
            f"model.num_kv_heads={opened.model.num_kv_heads}, or as many others share each"
        )
    reason = re.sub(r"parallel\.\w+=\d+ with ", "", problem.partition(". Set ")[0])
    return re.sub(r"parallel\.\w+=\d+", f"--nproc={tp}", reason)


def writing_layout(model: ModelConfig, ranks: int) -> ParallelConfig:
    """How ranks share a model that writes: each has some of the features, and some of the
    experts where these divide evenly. All have all tokens, so that all take part in every
    exchange."""
    whole_experts = model.moe is not None and model.moe.num_experts % ranks == 0
    return ParallelConfig(tp=ranks, ep=ranks, etp=1) if whole_experts else ParallelConfig(tp=ranks)


def writing_problems(model: ModelConfig) -> list[str]:
    """What keeps a model from writing token by token, as messages for the user."""
    if model.attention.causal:
        return []
    return [
        f"model.attention.causal={str(model.attention.causal).lower()}: its tokens look at what "
        "comes after them, "
        f"which is not written yet. Use a model with model.attention.causal=true to generate."
    ]


def load_text_generator(
    source: Pretrained,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernels: Kernel = "auto",
    mlp_chunks: int = 1,
) -> TextGenerator:
    """Build this rank's slice of the model, which computes by `kernels` and reads prompts in
    `mlp_chunks`, and fill it. Collective over the mesh.

    Raises:
        CheckpointError: its weights are damaged.
        ConfigError: there are chunks, and no MLP that could read them.
        DataError: its tokenizer is gone, or has more tokens than the model.
    """
    tokenizer = build_tokenizer(source.tokenizer)
    check_vocabulary(tokenizer, source.model, source.path)
    # MTP layers are for training: text is written a token at a time.
    model = Decoder(replace(source.model, mtp=MTPConfig()), mesh, dtype=dtype)
    use_kernels([model], kernels, mesh)
    if mlp_chunks > 1 and read_prompts_in_chunks(model, mlp_chunks) == 0:
        raise ConfigError(
            f"--mlp-chunks={mlp_chunks} divides what MLPs read, and no layer of {source.path} has "
            "one that all tokens "
            f"read. Remove --mlp-chunks, or set it to 1."
        )
    allocate(model, device)
    entries = [
        CheckpointEntry(declared.shard, "param", getattr(module, name))
        for declared, module, name in declared_parameters(model)
    ]
    fill_from(
        source,
        entries,
        mesh.world,
        rules=CheckpointConfig(skip=MTP_PARAMETERS if source.model.mtp.num_layers else ()),
    )
    return TextGenerator(model.eval(), tokenizer, stop_ids(source, tokenizer))


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, path: Path) -> None:
    """Refuse a tokenizer that makes ids the model has no rows for.

    Raises:
        DataError: it does.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, and the model knows "
            f"{model.vocab_size}. "
            f"Use the tokenizer that the model was trained with."
        )


def stop_ids(source: Pretrained, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: those the folder names, and the tokenizer's own end of a
    document."""
    named = source.stop_ids()
    foreign = source.checkpoint is None or bool(
        source.token_ids
    )  # a folder of others, or made from one
    if (
        foreign and source.tokenizer.kind == "null"
    ):  # no tokenizer came with it; its ids have no names
        return named
    try:
        return named | {tokenizer.eod}
    except DataError:  # the tokenizer has none: fine for writing, which then ends by length
        return named
