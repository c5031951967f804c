"""Folders with random LoRA adapters of a model, as training and PEFT write them."""

from dataclasses import replace
from pathlib import Path

import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import TokenizerConfig
from megalith.config.lora import LoraConfig
from megalith.config.tree import dump_yaml
from megalith.hf.peft import RECORD, adapter_names, adapter_shape
from megalith.hf.pretrained import build_base_record, locate_source, open_pretrained
from megalith.hf.release import parameters, release_run
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard
from megalith.posttrain.export import write_peft

LORA = LoraConfig(rank=3, alpha=4.5)


def save_adapter(
    folder: Path, base: Path, *, seed: int, lora: LoraConfig = LORA, scale: float = 0.5
) -> Path:
    """Write a checkpoint of adapters, with outputs as large as those of the base."""
    source = open_pretrained(locate_source(str(base)))
    shapes = {shard.name: shard.shape for shard in parameters(source.model)}
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for name in sorted(adapter_names(lora, source.model)):
        parameter, _, word = name.rpartition(".lora_")
        shape = adapter_shape(shapes[parameter], parameter, lora.rank, word)
        values = scale * torch.randn(shape, generator=generator)
        entries.append(CheckpointEntry(Shard.full(name, shape), "param", values))
    run = replace(release_run("lora", source.model, TokenizerConfig(), base), lora=lora)
    state = {RECORD: build_base_record(source)}
    group = single_rank_group("world")
    return save_checkpoint(folder, 1, entries, state, group, config_text=dump_yaml(run)).path


def save_peft_adapter(folder: Path, base: Path, *, seed: int, lora: LoraConfig = LORA) -> Path:
    """Write adapters as PEFT does."""
    adapter = save_adapter(folder / "run", base, seed=seed, lora=lora)
    write_peft(folder / "peft", open_pretrained(adapter))
    return folder / "peft"
