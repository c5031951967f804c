"""Strings that are data keep their values: random keys, fingerprints, hashes, parameter names,
entry-point groups.

tests/stored_strings.yaml has the values of commit cc3656c. A run that is resumed, a cache that is
read again and a checkpoint depend on them, so a name in the code may change and these may not. A
value that has to change needs a reader for the old one; `python tests/test_stored_strings.py`
prints the present values.
"""

import ast
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megalith.config.data import DataConfig, MockLengths, SFTConfig
from megalith.config.generation import SamplingParams
from megalith.config.lora import LoraConfig
from megalith.config.model import CrossConfig, DropoutConfig, ModelConfig, MTPConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.train import CALLBACK_GROUP
from megalith.data.build import Splits, build_datasets
from megalith.data.cache import load_or_build
from megalith.data.chat_template import ChatTemplate
from megalith.data.indexed import IndexedDatasetBuilder
from megalith.data.packs import pack_first_fit, write_packs
from megalith.data.sample import Dataset, SampleSettings
from megalith.data.sft import ConversationDataset, build_conversations, generate_mock_conversations
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer
from megalith.hf.release import parameters
from megalith.infer.sample import SampleRow, sample_tokens
from megalith.infer.vocab_slice import VocabSlice
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder, allocate, initialize
from megalith.nn.build import build_context
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan import keys
from megalith.plan.layers import moe
from megalith.recipes import recipes
from megalith.train.objective import sum_lm_losses

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("stored_strings.yaml")
FAMILIES = (
    *(
        "llama3_8b",
        "mistral_7b",
        "qwen2_7b",
        "qwen3_0_6b",
        "qwen3_30b_a3b",
        "qwen1_5_moe_a2_7b",
        "gemma_2b",
    ),
    *(
        "gemma2_2b",
        "gemma3_1b",
        "olmo2_1b",
        "olmoe_7b",
        "smollm3_3b",
        "granite_2b",
        "phi3_mini",
        "starcoder2_3b",
    ),
    *(
        "gpt2_124m",
        "pythia_160m",
        "mixtral_8x7b",
        "deepseek_v2_lite",
        "deepseek_v3",
        "gpt_oss_20b",
        "llama4_scout",
    ),
    *("tiny_cpu", "moe_tiny", "lora_tiny"),
)
"""Recipes that together have every family."""

TINY = ModelConfig(
    vocab_size=17,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn_hidden_size=12,
    max_seq_len=8,
    dropout=DropoutConfig(embedding=0.1, residual=0.1, attention=0.1),
)
BIASED = RouterConfig(expert_bias=True, jitter=0.1, force_biased=0.5)
RANDOM = RouterConfig(force_load_balancing=True)
TINY_MODELS = {
    "cross-layer attention": replace(TINY, cross=CrossConfig(memory=1)),
    "MTP": replace(TINY, mtp=MTPConfig(num_layers=1)),
    "experts": replace(TINY, moe=MoEConfig(num_experts=2, ffn_hidden_size=4, router=BIASED)),
    "random routing": replace(TINY, moe=MoEConfig(num_experts=2, ffn_hidden_size=4, router=RANDOM)),
}


@contextmanager
def recorded_keys() -> Iterator[list[str]]:
    """Yield a list that gets the text of every random key that is made: seed, purpose, name and
    indices."""
    texts: list[str] = []

    def blake2b(text: bytes, *, digest_size: int) -> Any:  # Any: hashlib's own type
        texts.append(text.decode().replace("\x00", " / "))
        return hashlib.blake2b(text, digest_size=digest_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "hashlib", SimpleNamespace(blake2b=blake2b))
        yield texts


def compute_key_values(_: Path) -> dict[str, int]:
    """Return the keys of some draws."""
    arguments: list[tuple[int, str, str, tuple[int, ...]]] = [
        (1, "init", "layers.0.attention.q", (0, 0, 0)),
        (2, "sft", "packs", ()),
        (3, "dropout", "attention", (7,)),
    ]
    return {f"{a} {b} {c} {d}": keys.key(a, b, c, *d) for a, b, c, d in arguments}


def collect_key_purposes(_: Path) -> list[str]:
    """Return the literal arguments of every call of `key` in the package."""
    purposes = set()
    for path in (ROOT / "megalith").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("key", "key_of")
            ):
                words = [
                    arg.value if isinstance(arg, ast.Constant) else "*" for arg in node.args[1:3]
                ]
                purposes.add(" / ".join(map(str, words)))
    return sorted(purposes)


def record_model_keys(_: Path) -> dict[str, list[str]]:
    """Return the keys of initial weights, and of one training forward with every kind of
    dropout."""
    ids = torch.arange(4)
    tokens = LayerInputs(seq_params_from_rows(1, 4), dropout_key=DropoutKey(5, ids))
    recorded = {}
    for name, config in TINY_MODELS.items():
        lora = LoraConfig(rank=2, dropout=0.1)
        model = Decoder(build_context(config, build_single_rank_mesh(), lora=lora))
        allocate(model, torch.device("cpu"))
        with recorded_keys() as texts:
            initialize(model, seed=3)
            sum_lm_losses(
                model.outputs(
                    ids, tokens, mtp_inputs=((ids, ids),) if config.mtp.num_layers else ()
                ),
                ids,
                ((ids, ids),) if config.mtp.num_layers else (),
            )
        last_tiles = {_without_indices(text): text for text in sorted(texts)}
        recorded[name] = sorted(last_tiles.values())
    return recorded


def _without_indices(text: str) -> str:
    return re.sub(r"( / \d+)+$", "", text) if " / init / " in text else text


def conversations(packing: str, *, packs: Path | None = None) -> ConversationDataset:
    """Build the training rows of 30 conversations."""
    settings: dict[str, Any] = (
        {"packing": packing} if packs is None else {"packs": str(packs)}
    )  # Any: of SFTConfig
    data = DataConfig(sft=SFTConfig(mock_conversations=30, template="identity", **settings))
    return build_conversations(
        data,
        SampleSettings(seq_len=150, seed=1, vocab_size=257),
        split="train",
        num_samples=None,
        tokenizer=ByteTokenizer(),
        tokenizer_path=None,
    )


def record_data_keys(folder: Path) -> list[str]:
    """Return the keys of made-up conversations, packing, the orders of epochs, documents and
    sampling."""
    with recorded_keys() as texts:
        list(generate_mock_conversations(2, 7))
        rows = conversations("best_fit")
        write_packs(
            folder / "packs.npz", rows.packing_input(), pack_first_fit(rows.packing_input(), 4)
        )
        mock_splits(whole_documents=True, overlong="truncate")
        row = SampleRow(params=SamplingParams(), seed=9, choice=2, position=5)
        sample_tokens(torch.zeros(1, 3), [row], VocabSlice(single_rank_group("tp"), 0, 3, 3))
    return sorted({text for text in texts if "made up" not in text or text.startswith("7 ")})


def describe_made_up(_: Path) -> list[str]:
    """Return the texts of two made-up conversations."""
    return [json.dumps(conversation.messages) for conversation in generate_mock_conversations(2, 7)]


def mock_splits(*, whole_documents: bool = False, **settings: Any) -> Splits:  # Any: of DataConfig
    """Build small splits of mock data, and read one sample."""
    data = DataConfig(mock=True, mock_num_documents=60, mock_max_tokens=30, **settings)
    splits = build_datasets(
        data,
        SampleSettings(seq_len=16, seed=2, vocab_size=50, eod=49, whole_documents=whole_documents),
        train_samples=4,
        valid_samples=2,
    )
    assert splits.train is not None
    splits.train.sample(0)
    return splits


def write_store(prefix: Path, first: int) -> str:
    """Write a token store of twelve documents."""
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for document in range(12):
            builder.add_document(np.arange(9) + first + document, [9])
        builder.finalize()
    return str(prefix)


def stored_splits(folder: Path, *paths: str) -> Splits:
    """Build splits of token stores, with their indices in a folder."""
    data = DataConfig(path=paths, split="90,10,0", cache_path=str(folder / "cache"))
    return build_datasets(
        data,
        SampleSettings(seq_len=8, seed=2, vocab_size=100, eod=99),
        train_samples=4,
        valid_samples=1,
    )


def fingerprint_of(dataset: Dataset | None) -> str:
    """Return the fingerprint of a split that has to exist."""
    assert dataset is not None
    return dataset.fingerprint


def compute_fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprints of small datasets, tokenizers and templates."""
    prefixes = [write_store(folder / name, first) for name, first in (("a", 1), ("b", 40))]
    (folder / "lengths.txt").write_text("3\n14\n15\n")
    lengths = MockLengths(kind="file", path=str(folder / "lengths.txt"))
    mock = mock_splits()
    rows = conversations("best_fit")
    write_packs(folder / "packs.npz", rows.packing_input(), pack_first_fit(rows.packing_input(), 4))
    return {
        "mock, train": fingerprint_of(mock.train),
        "mock, valid": fingerprint_of(mock.valid),
        "mock, lengths of a file": fingerprint_of(mock_splits(mock_lengths=lengths).train),
        "documents": fingerprint_of(mock_splits(whole_documents=True, overlong="truncate").train),
        "token store": fingerprint_of(stored_splits(folder, prefixes[0]).train),
        "weighted blend": fingerprint_of(
            stored_splits(folder, "0.3", prefixes[0], "0.7", prefixes[1]).train
        ),
        "conversations": rows.fingerprint,
        "conversations, row": conversations("row").fingerprint,
        "conversations, file of packs": conversations(
            "best_fit", packs=folder / "packs.npz"
        ).fingerprint,
        "byte tokenizer": ByteTokenizer().fingerprint,
        "null tokenizer": NullTokenizer(7).fingerprint,
        "chat template": ChatTemplate("t", "{{ messages }}", {"bos_token": "<s>"}).fingerprint,
    }


def list_cache_files(folder: Path) -> list[str]:
    """Return the names of the files of an index, and of those of the cache of stored splits."""
    load_or_build(folder / "one", "a description", lambda: {"order": np.arange(3)})
    stored_splits(folder, "0.3", write_store(folder / "a", 1), "0.7", write_store(folder / "b", 40))
    return sorted(path.name for name in ("one", "cache") for path in (folder / name).iterdir())


def list_parameters(_: Path) -> dict[str, list[str]]:
    """Return the parameter names of every family, with N for the numbers of layers and depths."""
    names = {}
    for recipe in FAMILIES:
        shards = parameters(recipes()[recipe]().model)
        names[recipe] = sorted({re.sub(r"\.\d+\.", ".N.", shard.name) for shard in shards})
    for name, config in TINY_MODELS.items():
        names[name] = sorted(shard.name for shard in parameters(config))
    return names


def list_entry_points(_: Path) -> list[str]:
    """Return the groups of entry points."""
    return [moe.GROUP, CALLBACK_GROUP]


VALUES: dict[str, Callable[[Path], Any]] = {  # Any: YAML
    "key_values": compute_key_values,
    "key_purposes": collect_key_purposes,
    "model_keys": record_model_keys,
    "data_keys": record_data_keys,
    "made_up": describe_made_up,
    "fingerprints": compute_fingerprints,
    "cache_files": list_cache_files,
    "parameters": list_parameters,
    "entry_points": list_entry_points,
}


@pytest.mark.parametrize("name", VALUES)
def test_stored_strings_have_the_values_of_the_golden_file(name: str, tmp_path: Path) -> None:
    expected = yaml.safe_load(GOLDEN.read_text())[name]
    assert VALUES[name](tmp_path) == expected


def test_the_golden_file_has_no_other_values() -> None:
    assert set(yaml.safe_load(GOLDEN.read_text())) == set(VALUES)


if __name__ == "__main__":
    document = {}
    for name, compute in VALUES.items():
        with tempfile.TemporaryDirectory() as folder:
            document[name] = compute(Path(folder))
    yaml.safe_dump(document, sys.stdout, sort_keys=False, width=118)
