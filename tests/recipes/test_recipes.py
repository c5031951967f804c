"""All recipes, and their lookup from the command line."""

from pathlib import Path

import pytest

from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides, from_dict, load_yaml, save_yaml, to_dict
from megalith.errors import ConfigError
from megalith.optim.schedule import count_warmup_steps
from megalith.plan.costs import num_parameters
from megalith.plan.grid import min_world_size
from megalith.recipes import recipes, resolve, resolve_run
from megalith.rules.run import run_problems
from megalith.verify.ranks import compare_with_one_process
from megalith.verify.shrink import shrink

QUICK = "gemma_2b"
"""On one rank: run in `make test`, the others in `make test-all`."""

EVERY = [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in recipes()]


@pytest.mark.parametrize("name", recipes())
def test_recipe_has_its_name_and_round_trips_through_yaml(name: str, tmp_path: Path) -> None:
    run = recipes()[name]()
    assert run.name == name
    assert from_dict(TrainRun, to_dict(run)) == run
    save_yaml(run, tmp_path / "run.yaml")
    assert load_yaml(tmp_path / "run.yaml", TrainRun) == run
    assert apply_overrides(run, {}) == run


@pytest.mark.parametrize("name", recipes())
def test_recipe_violates_no_rule(name: str) -> None:
    run = recipes()[name]()
    assert run_problems(run, world=min_world_size(run.parallel)) == []
    vocab_size = {"byte": 257, "null": run.tokenizer.vocab_size}[run.tokenizer.kind]
    assert vocab_size == run.model.vocab_size


@pytest.mark.parametrize("steps", [1, 3, 60])
@pytest.mark.parametrize(
    "name",
    [
        "tiny_cpu",
        "sft_tiny",
        "lora_tiny",
        "moe_tiny",
        "quickstart",
        "llama_6m",
        "llama_29m",
        "llama_125m",
    ],
)
def test_recipe_for_small_machines_takes_any_number_of_steps(name: str, steps: int) -> None:
    run = apply_overrides(resolve(name), {"train.steps": str(steps)})
    assert run_problems(run, world=min_world_size(run.parallel)) == []


@pytest.mark.parametrize(
    ("name", "warmup_steps"),
    [
        ("tiny_cpu", 5),
        ("sft_tiny", 5),
        ("lora_tiny", 5),
        ("moe_tiny", 40),
        ("quickstart", 60),
        ("llama_6m", 50),
        ("llama_29m", 100),
        ("llama_125m", 700),
    ],
)
def test_warmup_share_of_a_recipe_is_a_known_number_of_steps(name: str, warmup_steps: int) -> None:
    run = resolve(name)
    assert count_warmup_steps(run.schedule, run.train.steps) == warmup_steps


@pytest.mark.parametrize("name", EVERY)
def test_a_shrunk_recipe_runs_and_computes_what_one_process_does(name: str) -> None:
    run = recipes()[name]()
    cases = shrink(run, min_world_size(run.parallel))
    assert cases
    for case in cases:
        assert [result for result in compare_with_one_process(case) if not result.holds] == []


def test_recipes_are_listed_smallest_first() -> None:
    sizes = {
        name: num_parameters(recipe().model)
        for name, recipe in recipes().items()
        if name != "tiny_cpu"
    }
    assert list(sizes.values()) == sorted(sizes.values())
    assert next(iter(recipes())) == "tiny_cpu", "the one to start with"


def test_a_name_a_file_and_the_folder_of_a_run_are_resolved(tmp_path: Path) -> None:
    run = resolve("tiny_cpu")
    save_yaml(run, tmp_path / "config.yaml")
    assert resolve(str(tmp_path / "config.yaml")) == run
    assert resolve(str(tmp_path)) == run


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="so it is not the folder of a run. Use the folder of a run, such as runs/NAME",
    ):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError,
        match="is a Hugging Face folder, which has no settings of a run. Run `megalith conv",
    ):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "target, text",
    [
        ("tiny-cpu", "tiny-cpu is neither a recipe nor a file. Did you mean tiny_cpu?"),
        ("qqqq", "Recipes: tiny_cpu, sft_tiny, lora_tiny, moe_tiny, quickstart"),
        ("nowhere/run.yaml", "nowhere/run.yaml: no such file."),
    ],
)
def test_unknown_recipe_is_rejected_with_similar_names(target: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(target)
    assert text in str(error.value)


def cached_run(tmp_path: Path, cache: str, **data: str) -> str:
    """A YAML file that names a cache folder."""
    overrides = {"data.cache_path": cache} | {f"data.{name}": value for name, value in data.items()}
    save_yaml(apply_overrides(resolve("tiny_cpu"), overrides), tmp_path / "work" / "run.yaml")
    return str(tmp_path / "work" / "run.yaml")


@pytest.mark.parametrize(
    "cache", ["../elsewhere", "/tmp/elsewhere", "link/cache", "{data}/../cache", ".."]
)
def test_yaml_file_cannot_choose_a_cache_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    for name in ("work", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "text.idx").touch()
    (tmp_path / "work" / "link").symlink_to("/tmp")
    monkeypatch.chdir(tmp_path / "work")
    cache = cache.format(data=tmp_path / "data")
    file = cached_run(tmp_path, cache, mock="false", path=str(tmp_path / "data" / "text"))
    with pytest.raises(ConfigError) as caught:
        resolve_run(file, {})
    assert f"{file}: data.cache_path={cache} is neither below the working directory" in str(
        caught.value
    )
    assert f"Pass --data.cache_path {cache} to use it" in str(caught.value)
    assert resolve_run(file, {"data.cache_path": cache}).data.cache_path == cache
    assert resolve(file).data.cache_path == cache, "which plans and shows it only"


@pytest.mark.parametrize(
    "cache", ["cache", "{work}/deep/cache", "{data}", "{data}/cache", "../data/cache"]
)
def test_cache_folder_of_a_yaml_file_is_below_the_working_directory_or_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    for name in ("work", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "text.idx").touch()
    monkeypatch.chdir(tmp_path / "work")
    cache = cache.format(work=tmp_path / "work", data=tmp_path / "data")
    file = cached_run(tmp_path, cache, mock="false", path=str(tmp_path / "data" / "text"))
    assert resolve_run(file, {}).data.cache_path == cache
