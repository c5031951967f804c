"""Config trees to and from dicts, YAML and overrides."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from megalith.config.data import PrepareConfig
from megalith.config.fields import (
    describe,
    is_sequence_type,
    item_hints,
    literal_values,
    union_options,
)
from megalith.config.train import TrainRun
from megalith.config.tree import (
    apply_overrides,
    differences,
    dump_yaml,
    flatten,
    from_dict,
    load_yaml,
    save_yaml,
    to_dict,
)
from megalith.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A section with a required field."""

    lr: float
    """Learning rate."""

    style: Literal["constant", "cosine", "none"] = "cosine"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One of several."""

    path: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Every kind of field."""

    name: str
    rate: Rate
    steps: int = 10
    on: bool = False
    cap: int | None = None
    plot: bool | None = None
    paths: tuple[str, ...] = ()
    sizes: list[int] = field(default_factory=list)
    pair: tuple[int, str] = (1, "a")
    items: tuple[Item, ...] = ()
    maybe: Rate | None = None
    table: dict[str, float] = field(default_factory=dict)
    either: str | float = "auto"
    level: Literal[0, 1, 2] = 1
    number: float | int = 0
    mood: Literal["none", "good"] | None = None
    moods: tuple[Literal["very-good", "good", "bad"], ...] = ()


FULL = Run(
    name="größe: [1]",
    rate=Rate(lr=3e-5, style="none"),
    steps=4_000_000,
    on=True,
    cap=7,
    plot=False,
    paths=("a b", "0.3", "true", "null", "1e-4"),
    sizes=[1, 2],
    pair=(3, "off"),
    items=(Item(path="x"), Item(path="y", weight=0.1)),
    maybe=Rate(lr=1.0),
    table={"a": 1.5},
    either=2.5,
    level=2,
)
SMALL = Run(name="x", rate=Rate(lr=0.1))


def problems(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        from_dict(Run, data)
    return str(error.value)


def overridden(**changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        apply_overrides(SMALL, {name.replace("__", "."): value for name, value in changes.items()})
    return str(error.value)


# --- dict and YAML


@pytest.mark.parametrize("run", [FULL, SMALL])
def test_run_round_trips_through_dict_and_yaml(run: Run, tmp_path: Path) -> None:
    assert from_dict(Run, to_dict(run)) == run
    save_yaml(run, tmp_path / "run.yaml")
    loaded = load_yaml(tmp_path / "run.yaml", Run)
    assert loaded == run
    assert type(loaded.paths) is tuple
    assert type(loaded.rate.lr) is float


def test_yaml_keeps_the_order_of_the_fields() -> None:
    assert dump_yaml(SMALL).startswith("name: x\nrate:\n  lr: 0.1\n  style: cosine\nsteps: 10\n")


def test_numbers_are_read_in_common_notations(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: x\nrate: {lr: 3e-4}\nsteps: 1_000_000\ncap: 4e6\nsizes: [1e3]\ntable: {a: 1}\n"
    )
    run = load_yaml(file, Run)
    assert run.rate.lr == 0.0003
    assert run.steps == 1_000_000
    assert (run.cap, type(run.cap)) == (4_000_000, int)
    assert run.sizes == [1000]
    assert type(run.table["a"]) is float


def test_missing_file_names_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"frist.yaml: no such file. Did you mean first.yaml\?"):
        load_yaml(tmp_path / "frist.yaml", Run)
    with pytest.raises(ConfigError, match="no such file. Pass a YAML file that exists."):
        load_yaml(tmp_path / "nowhere" / "other.yaml", Run)


@pytest.mark.parametrize(
    "content, text",
    [
        (b"", "contains nothing: expected a mapping of name, rate"),
        (b"hello", "contains only 'hello': expected a mapping"),
        (b"a: [1", "is not YAML"),
        (b"a: [1", 'run.yaml", line 1, column 6'),
        (b"a: \x01", 'run.yaml", position 3'),
        (b"\xff\xfe", "is not text: byte 0 is not UTF-8"),
        (b"name: !!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_file_that_is_not_a_config_is_rejected_by_name(
    content: bytes, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_yaml(file, Run)
    assert str(file) in str(error.value)
    assert text in str(error.value)
    assert "<unicode string>" not in str(error.value)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_yaml(tmp_path, Run)


def test_repeated_key_is_reported_with_all_other_problems(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: x\nrate: {lr: 1, lr: 2}\nstep: 3\nname: y\n")
    with pytest.raises(ConfigError) as error:
        load_yaml(file, Run)
    text = str(error.value)
    assert "3 settings" in text
    assert "name is set more than once. Remove all but one." in text
    assert "rate.lr is set more than once" in text
    assert "Did you mean steps?" in text


def alias_bomb(levels: int = 12) -> str:
    lines = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, levels)]
    return "a0: &a0 [x]\n" + "".join(lines)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("name: 2001-99-99", "'2001-99-99' is not a valid timestamp (month must be in 1..12)"),
        ("name: !!int abc", "'abc' is not a valid int"),
        ("name: !!int ''", "'' is not a valid int"),
        ("name: !!bool abc", "'abc' is not a valid bool"),
        ("name: !!float abc", "'abc' is not a valid float"),
        ("name: !!timestamp abc", "'abc' is not a valid timestamp"),
        (f"steps: {2**63}", "is not a valid int (the largest is 9223372036854775807)"),
        (f"steps: 0x{'f' * 6000}", "is not a valid int"),
        (f"steps: {'9' * 6000}", "is not a valid int"),
        ("name: " + "[" * 1000, "mappings and lists are nested more than 50 deep"),
        ("? " * 1000, "mappings and lists are nested more than 50 deep"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(1000)), "nested more than 50 deep"),
        ("name: &a [*a]", "an alias contains itself"),
        ("name: &a {<<: *a}", "an alias contains itself"),
        (alias_bomb(), "more than 20,000 keys and values (each use of an alias counts)"),
        (
            f"a: &a {'x' * 300_000}\nb: [*a, *a]",
            "more than 524,288 characters (each use of an alias counts)",
        ),
        ("a: 1\n" * 20_000, "more than 20,000 keys and values"),
        ("#" * 600_000, "it has 600,000 characters, and the limit is 524,288"),
    ],
)
def test_yaml_beyond_limits_or_with_invalid_value_is_rejected_with_reason(
    content: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_yaml(file, Run)
    assert str(error.value).startswith(f"{file} is not YAML") and reason in str(error.value)
    assert len(str(error.value)) < 1000


def test_aliases_within_limits_are_expanded(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: &a x\nrate: {lr: 1}\npaths: [*a, *a]\nmaybe: {<<: {style: none}, lr: 2}\n"
    )
    run = load_yaml(file, Run)
    assert run.paths == ("x", "x") and run.maybe == Rate(lr=2.0, style="none")


def test_many_unknown_names_are_reported_in_bounded_time_and_space(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"name{number}: 1\n" for number in range(5000)))
    with pytest.raises(ConfigError, match=r"\.\.\. and 4902 more$") as error:
        load_yaml(file, Run)
    assert len(str(error.value)) < 20_000


@pytest.mark.parametrize("text", ["a\0b", "\udcff", "a\ud800"])
def test_text_that_no_file_can_hold_is_rejected(text: str) -> None:
    message = "it contains NUL or a character that is not valid Unicode. Use UTF-8 text without it."
    assert message in overridden(name=text)
    assert message in problems({"name": "x", "rate": {"lr": 1.0}, "paths": [text]})


def test_whole_number_beyond_64_bits_is_rejected() -> None:
    text = overridden(steps=str(2**63), cap="9" * 400)
    assert (
        f"steps={2**63}: the largest whole number is {2**63 - 1} (2**63 - 1). Use a smaller one."
        in text
    )
    assert "cap=999" in text and "rate.lr" in problems({"name": "x", "rate": {"lr": 10**400}})


def test_fuzzed_yaml_and_overrides_are_read_or_rejected_with_config_error(tmp_path: Path) -> None:
    pieces = [
        "name: ",
        "rate: {lr: 1}\n",
        "steps: ",
        "\n",
        "- ",
        "? ",
        ": ",
        "[",
        "]",
        "{",
        "}",
        "&a ",
        "*a",
        "<<: ",
        "!!int ",
        "!!bool ",
        "!!timestamp ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!python/name:os.system ",
        "2001-99-99",
        "1:99:99",
        "0x",
        "1e999",
        ".nan",
        "|\n",
        "'",
        '"',
        "\\u",
        "\\ud800",
        "%YAML 9.9\n",
        "---\n",
        "...\n",
        "\t",
        "é",
        "\x07",
        "x",
        "9" * 5000,
    ]
    file = tmp_path / "run.yaml"
    for seed in range(500):
        draw = random.Random(seed)
        text = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        name = draw.choice(
            ["name", "rate", "rate.lr", "steps", "cap", "paths", "pair", "items", "table", "either"]
        )
        file.write_text(text)
        for read in (partial(load_yaml, file, Run), partial(apply_overrides, SMALL, {name: text})):
            try:
                read()
            except ConfigError as error:
                if len(str(error)) > 5000:
                    pytest.fail(
                        f"seed {seed}, {name}, {text[:200]!r}: a message of {len(str(error))} "
                        "characters"
                    )
            except Exception as error:
                pytest.fail(f"seed {seed}, {name}, {text[:200]!r}: {error!r}")


# --- wrong data


def test_all_problems_are_reported_together_with_their_paths() -> None:
    text = problems(
        {"name": 3, "rate": {"lr": "fast", "stile": "cosine"}, "steps": True, "nmae": 1}
    )
    assert text.startswith("5 settings must be changed before this can run:")
    assert "name=3: expected text, found a whole number. Put it in quotes: '3'." in text
    assert "rate.lr=fast: expected a number, found text." in text
    assert "rate.stile='cosine': there is no such setting. Did you mean rate.style" in text
    assert "steps=True: expected a whole number, found true or false." in text
    assert "nmae=1: there is no such setting. Did you mean name" in text


def test_missing_settings_are_named_with_what_they_mean() -> None:
    assert (
        problems({"name": "x", "rate": {}})
        == "rate.lr is missing. Set it to a number: Learning rate."
    )
    assert "rate is missing:  Set rate.lr." in problems({"name": "x"})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"steps": 4.0}, "steps=4.0: expected a whole number, found a number. Use 4."),
        ({"steps": 4.5}, "steps=4.5: expected a whole number, found a number."),
        ({"steps": "8"}, "steps=8: expected a whole number, found text. Remove the quotes."),
        ({"steps": "1.5e0"}, "expected a whole number"),
        ({"steps": None}, "steps=None: expected a whole number, found null."),
        ({"on": 1}, "on=1: expected true or false, found a whole number."),
        ({"on": "true"}, "on=true: expected true or false, found text. Remove the quotes."),
        ({"cap": "many"}, "cap=many: expected a whole number or null, found text."),
        ({"paths": "corpus"}, "paths=corpus: expected a list of text, found text. Use [corpus]."),
        (
            {"paths": ["a", 0.3]},
            "paths[1]=0.3: expected text, found a number. Put it in quotes: '0.3'.",
        ),
        ({"pair": [1]}, "pair=[1]: expected a list of 2: a whole number, text, found a list."),
        ({"items": [{"path": "a", "wieght": 1}]}, "items[0].wieght=1: there is no such setting."),
        ({"items": [{}]}, "items[0].path is missing"),
        (
            {"rate": {"lr": 1, "style": "cosin"}},
            "rate.style=cosin: there is no such choice. Did you mean cosine? Use one of constant, "
            "cosine, none.",
        ),
        ({"rate": 3}, "rate=3: expected a mapping, found a whole number."),
        ({"rate": None}, "rate=None: expected a mapping, found null."),
        ({"maybe": {"lr": "x"}}, "maybe.lr=x: expected a number, found text."),
        ({"table": {"a": "x"}}, "table.a=x: expected a number"),
        ({"level": 3}, "level=3: there is no such choice. Use one of 0, 1, 2."),
        ({"level": 2.0}, "level=2.0: there is no such choice. Did you mean 2? Use one of 0, 1, 2."),
        (
            {"level": "2"},
            "level=2: there is no such choice. Remove the quotes. Use one of 0, 1, 2.",
        ),
        ({"level": True}, "level=True: there is no such choice. Use one of 0, 1, 2."),
        (
            {"mood": "Good"},
            "mood=Good: there is no such choice. Did you mean good? Use one of none, good or null.",
        ),
        (
            {"moods": ["good", "bda"]},
            "moods[1]=bda: there is no such choice. Did you mean bad? Use one of very-good",
        ),
        (
            {"moods": ["VERY_GOOD"]},
            "moods[0]=VERY_GOOD: there is no such choice. Did you mean very-good? Use one of",
        ),
        (
            {"moods": "god"},
            "moods=god: expected a list of one of very-good, good, bad, found text. Did you mean "
            "good?",
        ),
        (
            {"moods": "bad"},
            "moods=bad: expected a list of one of very-good, good, bad, found text. Use [bad].",
        ),
        ({"either": []}, "either=[]: expected text or a number, found a list."),
    ],
)
def test_wrong_type_is_reported_with_path_and_expected_type(
    change: dict[str, Any], text: str
) -> None:
    assert text in problems({"name": "x", "rate": {"lr": 0.1}} | change)


# --- choices of the real settings


def choices(cls: type) -> list[tuple[type, str, list[Any], bool]]:
    """(root, dotted name, choices, is it a list) of every setting that has nothing else."""
    results = []
    for setting in describe(cls):
        if bool in union_options(setting.hint):  # true, false or a choice: has a test of its own
            continue
        many = next(
            (option for option in union_options(setting.hint) if is_sequence_type(option)), None
        )
        words = literal_values(setting.hint if many is None else item_hints(many, 1)[0])
        results += [(cls, setting.path, words, many is not None)] if words else []
    return results


CHOICES = [choice for cls in (TrainRun, PrepareConfig) for choice in choices(cls)]


def test_settings_with_choices_are_listed() -> None:
    names = {path for _, path, _, _ in CHOICES}
    assert {
        "parallel.zero",
        "parallel.pipeline.schedule",
        "parallel.context.layers",
        "recompute.modules",
    } <= names
    assert len(names) > 15


@pytest.mark.parametrize(
    ("root", "path", "words", "many"), CHOICES, ids=[path for _, path, _, _ in CHOICES]
)
def test_invalid_choice_is_reported_with_field_value_choices_and_the_nearest(
    root: type, path: str, words: list[Any], many: bool
) -> None:
    sections = path.split(".")
    for word in words:
        typo = f"{word[:-1]}q{word[-1]}" if isinstance(word, str) else f"{word}.0"
        data: Any = [typo] if many else typo
        for name in reversed(sections):
            data = {name: data}
        with pytest.raises(ConfigError) as error:
            from_dict(root, data)
        (line,) = [line for line in str(error.value).splitlines() if f"={typo}:" in line]
        assert (
            f"{path}{'[0]' if many else ''}={typo}: there is no such choice. Did you mean " in line
        )
        assert str(word) in line.split("Did you mean ")[1].split("?")[0]
        assert f" Use one of {', '.join(map(str, words))}" in line


def test_word_that_is_neither_a_boolean_nor_a_choice_is_reported_with_the_nearest_choice() -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(TrainRun, {"checkpoint": {"async_save": "autqo"}})
    (line,) = [line for line in str(error.value).splitlines() if "async_save" in line]
    assert "checkpoint.async_save=autqo: expected true or false or one of auto" in line
    assert "Did you mean auto?" in line


# --- overrides


def test_overrides_are_read_by_the_type_of_their_field() -> None:
    texts: dict[str, Any] = {
        "name": "7",
        "rate.lr": "3e-5",
        "rate.style": "none",
        "steps": "1_000",
        "on": "true",
        "cap": "4e6",
        "plot": "off",
        "paths": ["a", "0.3"],
        "sizes": ["1", "2"],
        "pair": ["3", "b"],
        "items": "[{path: x}, {path: y, weight: 0.1}]",
        "maybe.lr": "1",
        "table.a": "1.5",
        "either": "2.5",
        "level": "2",
    }
    run = apply_overrides(SMALL, texts)
    assert run == Run(
        name="7",
        rate=Rate(lr=3e-5, style="none"),
        steps=1000,
        on=True,
        cap=4_000_000,
        plot=False,
        paths=("a", "0.3"),
        sizes=[1, 2],
        pair=(3, "b"),
        items=(Item(path="x"), Item(path="y", weight=0.1)),
        maybe=Rate(lr=1.0),
        table={"a": 1.5},
        either="2.5",  # text comes first in `str | float`
        level=2,
    )
    assert SMALL.steps == 10, "the run itself stays as it was"


def test_none_unsets_a_field_that_may_be_unset_and_only_such_a_field() -> None:
    run = apply_overrides(FULL, {"cap": "none", "maybe": "null", "rate.style": "none"})
    assert (run.cap, run.maybe, run.rate.style) == (None, None, "none")
    assert overridden(steps="none") == "steps=none: expected a whole number, found text."


def test_one_word_or_an_empty_list_make_a_list() -> None:
    assert apply_overrides(SMALL, {"paths": "a"}).paths == ("a",)
    assert apply_overrides(FULL, {"paths": "[]", "sizes": "[4]"}) == replace(
        FULL, paths=(), sizes=[4]
    )


def test_none_is_a_value_if_the_literal_has_it() -> None:
    assert apply_overrides(SMALL, {"mood": "none"}).mood == "none"
    assert apply_overrides(SMALL, {"mood": "null"}).mood is None


def test_a_whole_number_stays_whole_where_both_kinds_fit() -> None:
    assert type(from_dict(Run, to_dict(replace(SMALL, number=3))).number) is int
    assert type(from_dict(Run, to_dict(replace(SMALL, number=3.0))).number) is float


def test_a_mapping_replaces_a_whole_section() -> None:
    assert apply_overrides(FULL, {"rate": "{lr: 2e-3}"}).rate == Rate(lr=2e-3)


def test_unknown_names_and_wrong_values_are_reported_together() -> None:
    text = overridden(
        rate__lt="3",
        steps="ten",
        on="maybe",
        rate__lr=["1", "2"],
        rate__style="cosin",
        rate__lr__x="1",
    )
    assert text.startswith("6 settings must be changed")
    assert "rate.lt=3: there is no such setting. Did you mean rate.lr?" in text
    assert "steps=ten: expected a whole number, found text." in text
    assert "on=maybe: expected true or false, found text." in text
    assert "rate.lr=['1', '2']: expected a number, found a list." in text
    assert (
        "rate.style=cosin: there is no such choice. Did you mean cosine? Use one of constant, "
        "cosine, none." in text
    )
    assert "rate.lr is a single value. Set rate.lr instead." in text


# --- looking at runs


def test_flatten_names_every_leaf_and_differences_only_the_changed_ones() -> None:
    assert flatten(SMALL)["rate.lr"] == 0.1
    assert flatten(SMALL)["paths"] == []
    assert differences(SMALL, SMALL) == []
    changed = replace(SMALL, steps=11, maybe=Rate(lr=1.0))
    assert differences(SMALL, changed) == [
        ("steps", 10, 11),
        ("maybe.lr", None, 1.0),
        ("maybe.style", None, "cosine"),
    ]
