"""Suggestions of similar names."""

from megalith.errors import did_you_mean, nearest

NAMES = ["parallel.tp", "parallel.dp", "model.hidden_size", "schedule.lr", "train.steps"]


def test_misspelled_section_suggests_the_setting() -> None:
    assert nearest("paralel.tp", NAMES)[0] == "parallel.tp"


def test_name_without_its_section_suggests_the_setting() -> None:
    assert nearest("tp", NAMES) == ["parallel.tp"]
    assert nearest("hidden", NAMES) == ["model.hidden_size"]


def test_setting_in_the_wrong_section_suggests_the_right_one() -> None:
    assert nearest("train.lr", NAMES)[0] == "schedule.lr"


def test_case_does_not_matter() -> None:
    assert nearest("PARALLEL.TP", NAMES)[0] == "parallel.tp"


def test_unrelated_name_has_no_suggestion() -> None:
    assert nearest("zzzz", NAMES) == []
    assert did_you_mean("zzzz", NAMES) == ""


def test_only_names_about_as_similar_as_the_best_are_suggested() -> None:
    assert nearest("paralel.tp", [*NAMES, "parallel.sp"]) == ["parallel.tp"]


def test_suggestion_names_the_best_first_and_at_most_three() -> None:
    assert did_you_mean("parallel.tpp", NAMES) == " Did you mean parallel.tp?"
    assert did_you_mean("ab", ["abd", "abc"]) == " Did you mean abc or abd?"
    assert nearest("a", ["a1", "a2", "a3", "a4", "a1"]) == ["a1", "a2", "a3"]
