"""What a model is used with comes along: tokenizer, chat template, ends of turns, generation
settings and licenses."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.cli.main import main
from megalith.config.tree import apply_overrides
from megalith.data.chat_template import BUILT_IN
from megalith.data.huggingface import train_bpe
from megalith.data.tokenizer import build_tokenizer
from megalith.errors import DataError
from megalith.hf.convert import Kind, convert, copy_auxiliary_files, find_own_template
from megalith.hf.pretrained import Pretrained, locate_source, open_pretrained
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

TALK = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "7"}]
LENGTH = 320


def chat_tokenizer(path: Path) -> None:
    """A BPE tokenizer with the tokens of ChatML and another template of its own."""
    words = train_bpe(["What is three plus four? It is seven."] * 3, vocab_size=280, path=str(path))
    document = json.loads((path / "tokenizer.json").read_text())
    for number, text in enumerate(("<|im_start|>", "<|im_end|>"), words.vocab_size):
        document["added_tokens"].append(
            document["added_tokens"][0] | {"id": number, "content": text}
        )
    (path / "tokenizer.json").write_text(json.dumps(document))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def base(path: Path, tiny: SimpleNamespace) -> Path:
    """A folder of theirs with everything that may lie in one."""
    tiny.folder(
        path,
        tiny.config(vocab_size=300, max_seq_len=LENGTH),
        extra={"eos_token_id": 7, "bos_token_id": 1},
    )
    chat_tokenizer(path)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "temperature": 0.6})
    )
    (path / "LICENSE").write_text("as you like")
    (path / "USE_POLICY.md").write_text("be kind")
    return path


def tune(
    path: Path, load: Path, settings: Mapping[str, str], tokenizer: Path | None = None
) -> Path:
    """One step on conversations that are made up."""
    opened = open_pretrained(load)
    fixed = {
        "checkpoint.load": str(load),
        "data.mock": "false",
        "data.sft.mock_conversations": "40",
        "train.steps": "1",
        "train.seq_len": str(LENGTH),
        "train.eval_steps": "0",
        "tokenizer.kind": "huggingface",
        "tokenizer.path": str(tokenizer or load),
    }
    run = apply_overrides(replace(tiny_run(), model=opened.model), {**fixed, **settings})
    run_training(run, RunFolder(path), build_single_rank_mesh(), torch.device("cpu"), show=False)
    return path


ADAPTERS = {"lora.rank": "2"}


def opened(path: Path) -> Pretrained:
    return open_pretrained(locate_source(str(path)))


@pytest.mark.parametrize("settings", [ADAPTERS, {}])
def test_a_tuned_model_is_exported_with_its_chat_template(
    settings: dict[str, str],
    tmp_path: Path,
    tiny: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transformers = pytest.importorskip("transformers")
    run = tune(
        tmp_path / "run", base(tmp_path / "base", tiny), settings | {"data.sft.template": "chatml"}
    )
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    assert f"try: megalith chat {tmp_path / 'out'}" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    source = opened(run)
    template = find_own_template(source, build_tokenizer(source.tokenizer))
    assert template is not None and template.name == "chatml"
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == template.render(TALK)
    requested = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert (
        requested == template.render(TALK[:1], prompt=True) and "<|im_start|>assistant" in requested
    )
    settings_there = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings_there["chat_template"] == BUILT_IN["chatml"], "where older versions look"
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation == {"eos_token_id": [7, 8, end], "temperature": 0.6}
    assert (tmp_path / "out/LICENSE").read_text() == "as you like" and (
        tmp_path / "out/USE_POLICY.md"
    ).exists()
    again = opened(tmp_path / "out")
    assert again.stop_ids() >= {7, 8, end} and (not settings or source.stop_ids() == {7, 8})


def test_checkpoints_derived_from_a_tuned_model_have_its_template(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}[{{ m['content'] }}<|im_end|>]{% endfor %}"
    )
    load = base(tmp_path / "base", tiny)
    run = tune(
        tmp_path / "run", load, ADAPTERS | {"data.sft.template": str(tmp_path / "mine.jinja")}
    )
    convert(opened(run), tmp_path / "release", "megalith")
    (tmp_path / "mine.jinja").unlink()
    release = opened(tmp_path / "release")
    template = find_own_template(release, build_tokenizer(release.tokenizer))
    assert (
        template is not None
        and template.render(TALK) == "[What is 3 plus 4?<|im_end|>][7<|im_end|>]"
    )
    convert(release, tmp_path / "theirs", "huggingface")
    assert (tmp_path / "theirs/chat_template.jinja").read_text() == template.source
    convert(opened(run), tmp_path / "some", "huggingface")  # from the copy in the checkpoint
    assert (tmp_path / "some/chat_template.jinja").read_text() == template.source


def test_the_template_of_the_tokenizer_is_kept_and_its_end_token_added(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    load = base(tmp_path / "base", tiny)
    (load / "generation_config.json").unlink()
    run = tune(tmp_path / "run", load, ADAPTERS)
    source = opened(run)
    files = copy_auxiliary_files(
        source, {"eos_token_id": 7, "pad_token_id": None}, to_huggingface=True
    )
    assert "chat_template.jinja" not in files
    assert files["tokenizer_config.json"] == (load / "tokenizer_config.json").read_bytes()
    eod = build_tokenizer(source.tokenizer).eod
    assert json.loads(files["generation_config.json"]) == {
        "_from_model_config": True,
        "eos_token_id": [7, eod],
    }


def test_generation_config_is_not_copied_with_another_tokenizer(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    load = base(tmp_path / "base", tiny)
    train_bpe(["other words"] * 3, vocab_size=270, path=str(tmp_path / "words"))
    run = tune(
        tmp_path / "run",
        load,
        ADAPTERS | {"data.sft.template": "identity"},
        tokenizer=tmp_path / "words",
    )
    files = copy_auxiliary_files(opened(run), {}, to_huggingface=True)
    assert opened(run).generation_file() is None and opened(run).stop_ids() == {7}
    assert files["tokenizer.json"] == (tmp_path / "words/tokenizer.json").read_bytes()
    assert (
        "temperature" not in json.loads(files["generation_config.json"])
        and files["LICENSE"] == b"as you like"
    )


def test_vocab_and_merges_are_exported_as_tokenizer_json(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = base(tmp_path / "base", tiny)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(words["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in words["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(merges), encoding="utf-8")
    run = tune(
        tmp_path / "run", folder, {"data.sft.template": "identity"}, tmp_path / "gpt2-vocab.json"
    )
    expected_files = {
        "huggingface": {"tokenizer.json", "tokenizer_config.json"},
        "megalith": {"vocab.json", "merges.txt"},  # which its config.yaml names
    }
    for kind, expected in expected_files.items():
        assert main(["convert", str(run), str(tmp_path / kind), "--to", kind]) == 0
        names = {path.name for path in (tmp_path / kind).iterdir()}
        assert expected <= names and "gpt2-vocab.json" not in names
        (tmp_path / "gpt2-vocab.json").rename(tmp_path / "moved-vocab.json")
        tokenizer = build_tokenizer(opened(tmp_path / kind).tokenizer)
        (tmp_path / "moved-vocab.json").rename(tmp_path / "gpt2-vocab.json")
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "huggingface")
        assert tokenizer.encode("What is seven?") == reference("What is seven?").input_ids
        assert reference.eos_token_id == tokenizer.eod == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / f"gpt2-{name}").rename(folder / name)
    assert opened(folder).tokenizer.path == str(folder), "as old folders of GPT-2 are"
    assert build_tokenizer(opened(folder).tokenizer).encode("What is seven?") == tokenizer.encode(
        "What is seven?"
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CodeGenTokenizer"}')
    assert opened(folder).tokenizer.kind == "null", "whose files say less than that tokenizer does"


def test_a_folder_without_a_tokenizer_gets_no_template_and_a_release_does(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "base", tiny.config(vocab_size=300, max_seq_len=LENGTH))
    plain = {"tokenizer.kind": "byte", "tokenizer.path": "none", "data.sft.template": "chatml"}
    run = tune(tmp_path / "run", tmp_path / "base", ADAPTERS | plain)
    assert set(copy_auxiliary_files(opened(run), {}, to_huggingface=True)) == {
        "generation_config.json"
    }
    assert "chat_template.jinja" in copy_auxiliary_files(opened(run), {}, to_huggingface=False)


def test_auxiliary_files_without_tuning_are_copied_unchanged(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    load = base(tmp_path / "base", tiny)
    files = copy_auxiliary_files(opened(load), {}, to_huggingface=True)
    assert files == {
        name: path.read_bytes() for name, path in opened(load).auxiliary_files().items()
    }
    assert {"LICENSE", "USE_POLICY.md", "tokenizer.json", "generation_config.json"} <= files.keys()


def test_adapters_of_the_library_include_a_tokenizer(tmp_path: Path, tiny: SimpleNamespace) -> None:
    load = base(tmp_path / "base", tiny)
    run = tune(tmp_path / "run", load, ADAPTERS | {"data.sft.template": "chatml"})
    assert main(["convert", str(run), str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert (tmp_path / "peft/chat_template.jinja").read_text() == BUILT_IN["chatml"]
    assert opened(tmp_path / "peft").stop_ids() == {7, 8}
    (tmp_path / "peft/chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    source = opened(tmp_path / "peft")
    template = find_own_template(source, build_tokenizer(source.tokenizer))
    assert source.tokenizer.path == str(tmp_path / "peft") and template is not None
    assert template.render(TALK) == "What is 3 plus 4?!"
    convert(source, tmp_path / "merged", "huggingface")
    assert (tmp_path / "merged/chat_template.jinja").read_text() == template.source
    assert (tmp_path / "merged/LICENSE").exists()


def test_adapters_beside_a_release_name_it_and_are_read_with_it(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    assert main(["convert", str(base(tmp_path / "base", tiny)), str(tmp_path / "release")]) == 0
    run = tune(tmp_path / "run", tmp_path / "release", ADAPTERS)
    assert main(["convert", str(run), str(tmp_path / "peft"), "--to", "peft"]) == 0
    raw = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == str(tmp_path / "release")
    assert (
        opened(tmp_path / "peft").stop_ids() == {7, 8}
        and "LICENSE" in opened(tmp_path / "peft").auxiliary_files()
    )


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("tokenizer.json", b'{"model": {', "tokenizer.json: not JSON"),
        (
            "tokenizer.json",
            b'{"version": "1.0"}',
            'tokenizer.json: expected a "model" in it, got',
        ),
        ("tokenizer_config.json", b"\xff\xfe", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: expected an object, got"),
    ],
)
def test_an_invalid_auxiliary_file_is_rejected(
    name: str, contents: bytes, message: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "base", tiny.config())
    (tmp_path / "base" / name).write_bytes(contents)
    kinds: tuple[Kind, ...] = ("huggingface", "megalith")
    for to in kinds:
        with pytest.raises(DataError) as excinfo:
            convert(open_pretrained(tmp_path / "base"), tmp_path / "x", to)
        assert message in str(excinfo.value) and "again, or remove it" in str(excinfo.value)
    assert not (tmp_path / "x").exists()
