"""Tests of megalith/megatron/serving.py."""

import pytest

from megalith.config.serve import GraphConfig, SpeculationConfig
from megalith.config.server import ServeRun
from megalith.config.tree import apply_overrides
from megalith.megatron.parse import MegatronFlag, known_flags, mapped_flags, unmapped_flags
from megalith.megatron.serving import (
    ServeTranslation,
    format_command,
    is_serving_program,
    translate_serving,
)
from tests.megatron.conftest import Translate

DYNAMIC = "--inference-dynamic-batching"


def serve(text: str) -> ServeTranslation:
    return translate_serving(text.split())


def verdicts(translation: ServeTranslation) -> dict[str, str]:
    return {entry.flag.split()[0]: entry.verdict for entry in translation.entries}


def test_arguments_of_a_server_become_a_command() -> None:
    done = serve(
        f"--load /models/llama --bf16 --seed 7 {DYNAMIC} {DYNAMIC}-block-size 32 "
        f"{DYNAMIC}-max-requests 16 {DYNAMIC}-max-tokens 2048 --inference-max-seq-length 4096 "
        f"--no-{DYNAMIC[2:]}-prefix-caching --batch-invariant-mode --host 0.0.0.0 --port 8000 "
        "--chat-template chat.jinja --num-layers 2 --micro-batch-size 1"
    )
    assert done.problems == () and done.refusals(strict=True) == []
    assert format_command(done.command) == (
        "megalith serve /models/llama --engine.seed 7 --dtype bf16 --template chat.jinja "
        "--engine.cache.block_size 32 --engine.max_num_seqs 16 "
        "--engine.max_num_batched_tokens 2048 --engine.max_model_len 4096 "
        "--engine.cache.prefix_caching false --engine.batch_invariant true --host 0.0.0.0 "
        "--port 8000"
    )
    assert done.run == apply_overrides(
        ServeRun(),
        {
            "engine.seed": "7",
            "engine.cache.block_size": "32",
            "engine.max_num_seqs": "16",
            "engine.max_num_batched_tokens": "2048",
            "engine.max_model_len": "4096",
            "engine.cache.prefix_caching": "false",
            "engine.batch_invariant": "true",
            "server.host": "0.0.0.0",
            "server.port": "8000",
        },
    )
    assert verdicts(done)[DYNAMIC] == verdicts(done)["--num-layers"] == "already"


def test_without_arguments_the_defaults_of_serve_apply() -> None:
    done = serve("")
    assert done.command == ("megalith", "serve", "SOURCE") and done.run == ServeRun()


@pytest.mark.parametrize("words", ["--use-legacy-static-engine", "--engine-type static"])
def test_static_engine_becomes_static_batching(words: str) -> None:
    done = serve(words)
    assert done.run is not None and done.run.engine.batching == "static"
    dynamic = serve("--engine-type dynamic").run
    assert dynamic is not None and dynamic.engine.batching == "continuous"


def test_nvls_collectives_are_disabled_or_chosen_by_device() -> None:
    done = serve("--inference-disable-triton-nvls-kernels")
    assert done.run is not None and done.run.parallel.collectives == "process_group"
    assert done.command[-2:] == ("--parallel.collectives", "process_group")
    others = "--transformer-impl inference_optimized --symmetric-ar-type one_shot"
    done = serve(f"{others} --inference-fuse-tp-communication")
    assert done.run is not None and done.run.parallel.collectives == "auto"
    assert done.refusals(strict=True) == []
    assert verdicts(done)["--inference-fuse-tp-communication"] == "not mapped"


def test_first_of_several_limits_applies_and_the_other_is_reported() -> None:
    done = serve(f"--inference-max-requests 8 {DYNAMIC}-max-requests 16")
    assert done.run is not None and done.run.engine.max_num_seqs == 16
    (other,) = [entry for entry in done.entries if entry.flag == "--inference-max-requests 8"]
    assert other.text == "engine.max_num_seqs is determined by another argument"


def test_values_that_do_the_same_are_not_reported_as_missing() -> None:
    same = f"{DYNAMIC}-unified-memory-level 0 --num-speculative-tokens 0 --model-provider gpt"
    assert set(verdicts(serve(same)).values()) == {"already"}
    other = serve(f"{DYNAMIC}-unified-memory-level 1 --fp16")
    assert set(verdicts(other).values()) == {"not mapped"}
    assert other.refusals(strict=False) == []
    (message,) = other.refusals(strict=True)
    assert message.startswith("--fp16: not implemented: inference in fp16; use --dtype bf16")
    (message,) = serve("--model-provider mamba").refusals(strict=False)
    assert "models other than a GPT" in message


def test_draft_tokens_are_those_of_the_mtp_layers() -> None:
    done = serve("--num-speculative-tokens 2")
    assert done.run is not None
    assert done.run.engine.speculation == SpeculationConfig(method="mtp", num_draft_tokens=2)


@pytest.mark.parametrize(
    ("words", "graphs"),
    [
        (f"{DYNAMIC}-num-cuda-graphs 16", GraphConfig(num_buckets=16)),
        (f"{DYNAMIC}-num-cuda-graphs -1 --cuda-graph-impl local", GraphConfig()),
        ("--cuda-graph-impl none", GraphConfig(mode="none")),
        ("--inference-cuda-graph-scope none", GraphConfig(mode="none")),
        ("--inference-cuda-graph-scope block --decode-only-cuda-graphs", GraphConfig()),
        (
            "--inference-cuda-graph-max-tokens 300 "
            f"{DYNAMIC}-cuda-graph-sizing-distribution linear",
            GraphConfig(prefills="mixed", max_tokens=300, distribution="linear"),
        ),
        (
            f"--inference-cuda-graph-all-prefills {DYNAMIC}-cuda-graph-max-tokens 300",
            GraphConfig(prefills="all"),
        ),
    ],
)
def test_cuda_graphs_of_inference_are_translated(words: str, graphs: GraphConfig) -> None:
    done = serve(words)
    assert done.run is not None and done.run.engine.graphs == graphs
    assert set(verdicts(done).values()) <= {"mapped", "already"}


def test_cuda_graphs_of_training_are_reported() -> None:
    done = serve("--cuda-graph-impl full_iteration")
    assert verdicts(done) == {"--cuda-graph-impl": "already"}
    done = serve(f"{DYNAMIC}-cuda-graph-mixed-prefill-count 4")
    (entry,) = done.entries
    assert entry.verdict == "explained" and "1, 2, 4, ... prompts" in entry.text
    (problem,) = serve(f"{DYNAMIC}-num-cuda-graphs 0").problems
    assert problem.startswith("engine.graphs.num_buckets=0 must be at least 1")


def test_tensor_parallel_model_is_served_by_several_processes() -> None:
    done = serve("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1")
    assert verdicts(done) == {
        "--tensor-model-parallel-size": "mapped",
        "--pipeline-model-parallel-size": "already",
    }
    assert done.command == ("megalith", "serve", "SOURCE", "--nproc", "2")
    done = serve("--pipeline-model-parallel-size 2 --parsers deepseek-r1-reasoning")
    assert verdicts(done) == {
        "--pipeline-model-parallel-size": "not mapped",
        "--parsers": "explained",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{DYNAMIC}-block-size x", "block-size x: expected a whole number"),
        ("--inference-max-seq-length 0", "engine.max_model_len=0 must be at least 1"),
        ("--port 70000", "server.port=70000 must be at most 65535"),
        ("--seed x", "engine.seed=x"),
        ("--engine-type fast", "--engine-type fast: Megatron has no such choice"),
        ("--inference-max-seq-lenth 8", "Did you mean --inference-max-seq-length"),
        ("--port $PORT", "$PORT is not set. Pass --set PORT=VALUE"),
    ],
)
def test_invalid_arguments_are_problems(words: str, message: str) -> None:
    done = serve(words)
    assert done.command == () and done.run is None
    (problem,) = done.problems
    assert message in problem


def _sample_words(flag: MegatronFlag | None) -> str:
    if flag is None or flag.type == "switch":
        return ""
    return flag.choices[0] if flag.choices else "3"


def test_every_flag_is_reported() -> None:
    for name in known_flags():
        flag = mapped_flags("serve").get(name)
        done = serve(f"{name} {_sample_words(flag)}")
        output = [entry.flag for entry in done.entries] + list(done.problems)
        other = unmapped_flags("serve").get(name)
        first_name = name if flag or other is None else other.flag
        assert any(text.split()[0].rstrip(":") == first_name for text in output), name


def test_training_reports_flags_of_servers_as_unread(tiny: Translate) -> None:
    done = tiny(f"{DYNAMIC}-block-size 32 --num-speculative-tokens 2")
    assert done.run == tiny().run and done.refusals(strict=True) == []
    (text,) = {entry.text for entry in done.entries if "inference" in entry.text}
    assert "training does not read it: use --serve" in text


def test_serving_programs_are_recognized() -> None:
    for name in (
        "tools/run_text_generation_server.py",
        "tools/run_dynamic_text_generation_server.py",
        "examples/inference/gpt/gpt_dynamic_inference.py",
    ):
        assert is_serving_program(name), name
    assert not is_serving_program("pretrain_gpt.py") and not is_serving_program(None)


def test_command_is_quoted_for_a_shell() -> None:
    assert format_command(["a b", "${CKPT}/x"]) == "'a b' ${CKPT}/x"
