import pytest

from megalith.config.data import DataConfig, SFTConfig, data_problems, sft_problems
from megalith.config.fields import range_problems


def test_conversations_are_a_data_source() -> None:
    assert data_problems(DataConfig(sft=SFTConfig(mock_conversations=3))) == []
    assert (
        data_problems(DataConfig(sft=SFTConfig(path=("a.jsonl",), valid_path=("b.jsonl",)))) == []
    )
    (problem,) = data_problems(DataConfig(mock=True, sft=SFTConfig(path=("a.jsonl",))))
    assert problem.startswith(
        "data has 2 sources (mock, sft): exactly one is needed. Set one of data.path"
    )


@pytest.mark.parametrize(
    ("sft", "message"),
    [
        (
            SFTConfig(path=("a",), mock_conversations=3),
            "data.sft.mock_conversations=3 with data.sft.path=a: set only one",
        ),
        (SFTConfig(mock_conversations=0), "data.sft.mock_conversations=0 must be at least 1"),
        (SFTConfig(valid_path=("b",)), "data.sft.valid_path=b needs data.sft.path"),
        (
            SFTConfig(date="26 Jul 2024"),
            "data.sft.date='26 Jul 2024' must be an ISO date such as 2024-07-26.",
        ),
    ],
)
def test_invalid_settings_are_reported(sft: SFTConfig, message: str) -> None:
    (problem,) = range_problems(sft, "data.sft") + sft_problems(sft)
    assert problem.startswith(message)


def test_settings_of_text_are_rejected_with_conversations() -> None:
    data = DataConfig(sft=SFTConfig(path=("a",)), document_masking=True, sampler="cyclic")
    (problem,) = data_problems(data)
    assert problem.startswith(
        "data.document_masking=True and data.sampler=cyclic with data.sft: these settings "
        "apply to text"
    )
    assert problem.endswith("Remove them, or use data.path.")
