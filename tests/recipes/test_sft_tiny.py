from megalith.config.data import data_problems
from megalith.data.build import build_datasets
from megalith.data.tokenizer import ByteTokenizer
from megalith.recipes.sft_tiny import sft_tiny


def test_its_conversations_fit_its_rows_and_most_of_a_row_is_filled() -> None:
    run = sft_tiny()
    assert data_problems(run.data) == []
    splits = build_datasets(
        run.data, seq_len=run.train.seq_len, seed=run.seed, train_samples=8, valid_samples=8, test_samples=0,
        vocab_size=run.model.vocab_size, eod=256, tokenizer=ByteTokenizer(),
    )  # fmt: skip
    assert splits.train is not None and len(splits.notes) == 2
    assert "600 conversations; " in splits.notes[0], "none is cut or left out"
