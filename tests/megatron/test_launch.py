"""Launch scripts: tokens, variables and the training command."""

import pytest

from megalith.errors import ConfigError
from megalith.megatron.launch import OTHER_PROGRAMS, read_script, split_command
from megalith.megatron.shell import (
    ArrayLiteral,
    Operator,
    Variables,
    Word,
    WordPart,
    split_parts,
    tokenize,
    variable_names,
)

SCRIPT = r"""#!/bin/bash
# A launch script in the style that people keep.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
DATA=${1:-"MOCK"}   # a prefix, or MOCK
LAYERS=4
mkdir -p "$(dirname "$DATA")" || exit 1

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes "$NUM_NODES"     # change for one node
)
MODEL=(
    --num-layers $LAYERS
    --hidden-size $((LAYERS * 24))
    # --num-experts 8
    "--num-attention-heads 6"
)
OTHERS="--lr 3e-4 \
    --min-lr 3e-5"
if [[ "$DATA" == "MOCK" ]] || [[ -z "$DATA" ]]; then
    DATA_ARGS=("--mock-data")
else
    DATA_ARGS=(--data-path $DATA)
fi
MODEL+=("${DATA_ARGS[@]}")
if [ ! -f pretrain_gpt.py ]; then
    echo "pretrain_gpt.py is not here --num-layers"; exit 1
fi
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \
    "${MODEL[@]}" \
    ${OTHERS} --micro-batch-size 1 2>&1 | tee log.txt
set +x
"""


def arguments(script: str, **variables: str) -> str:
    """The arguments that a script passes on, in one text."""
    return " ".join(read_script(script, variables).arguments)


def test_variables_and_arrays_of_a_script_are_expanded() -> None:
    launch = read_script(SCRIPT, {})
    assert (launch.program, launch.world) == ("pretrain_gpt.py", 16)
    assert launch.arguments == (
        "--num-layers",
        "4",
        "--hidden-size",
        "96",
        "--num-attention-heads 6",
        "--mock-data",
        "--lr",
        "3e-4",
        "--min-lr",
        "3e-5",
        "--micro-batch-size",
        "1",
    )


def test_variables_of_the_caller_override_the_script() -> None:
    launch = read_script(SCRIPT, {"1": "/data/text", "LAYERS": "6", "NUM_NODES": "3"})
    assert launch.world == 24
    assert " ".join(launch.arguments).startswith("--num-layers 6 --hidden-size 144")
    assert "--data-path" in launch.arguments and "/data/text" in launch.arguments


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            'OPT=" --num-layers 2 \\\n --lr 1 "\npython pretrain_gpt.py $OPT',
            "--num-layers 2 --lr 1",
        ),
        ('CMD="torchrun pretrain_gpt.py --num-layers 2"\neval $CMD', "--num-layers 2"),
        ('CMD="python pretrain_gpt.py --num-layers 2"\nsrun -l bash -c "$CMD"', "--num-layers 2"),
        (
            "run() {\n  torchrun pretrain_gpt.py --num-layers $N $1\n}\nN=2\nrun --bf16",
            "--num-layers 2 --bf16",
        ),
        ("function f {\nA=3\n}\nA=2\nf\npython pretrain_gpt.py --num-layers $A", "--num-layers 3"),
        (
            "f() { if true; then { A=3; }; fi; }\nA=2\npython pretrain_gpt.py --num-layers $A",
            "--num-layers 2",
        ),
        ("A=1; B=$A\ntorchrun pretrain_gpt.py --num-layers $B", "--num-layers 1"),
        ("A=1 torchrun pretrain_gpt.py --num-layers 2", "--num-layers 2"),
        ("torchrun pretrain_gpt.py --num-layers 2 &> log", "--num-layers 2"),
        ("torchrun pretrain_gpt.py --num-layers 2 $@", "--num-layers 2"),
        (
            "declare -a A=(--lr 1)\nexport B=2\npython pretrain_gpt.py --num-layers $B ${A[*]}",
            "--num-layers 2 --lr 1",
        ),
        (
            "python tools/preprocess_data.py --input x\npython pretrain_gpt.py --num-layers 2",
            "--num-layers 2",
        ),
        (
            "echo torchrun pretrain_gpt.py --num-layers 1\ntorchrun pretrain_gpt.py --num-layers 2",
            "--num-layers 2",
        ),
        (
            "while [[ $# -gt 0 ]]; do\nA=9\ndone\nA=${A:-3}\npython pretrain_gpt.py "
            "--num-layers $A",
            "--num-layers 3",
        ),
        (
            "for i in 1 2; do\n echo $i\ndone\npython pretrain_gpt.py --num-layers 2",
            "--num-layers 2",
        ),
        (
            "[ 1 -eq 2 ] && A=1\n[ 1 -eq 1 ] && A=2\n[ 1 -eq 1 ] || A=3\npython pretrain_gpt.py "
            "--lr $A",
            "--lr 2",
        ),
        (
            "cat > x <<EOF\npython pretrain_gpt.py --lr 1\nEOF\npython pretrain_gpt.py "
            "--num-layers 2",
            "--num-layers 2",
        ),
    ],
)
def test_common_forms_of_launch_scripts_are_parsed(script: str, expected: str) -> None:
    assert arguments(script) == expected


BRANCHES = """
if [ "$KIND" = "a" ]; then N=1
elif [[ $KIND == "b" ]]; then N=2
else N=3; fi
if ! [ "$KIND" = "a" ]; then M=5; fi
python pretrain_gpt.py --num-layers $N --lr ${M:-4}
"""


@pytest.mark.parametrize(
    ("kind", "expected"), [("a", "1 --lr 4"), ("b", "2 --lr 5"), ("c", "3 --lr 5")]
)
def test_branch_with_a_true_condition_is_read(kind: str, expected: str) -> None:
    assert arguments(f"KIND={kind}\n{BRANCHES}") == f"--num-layers {expected}"


@pytest.mark.parametrize(
    "script",
    [
        "if [ -f x ]; then A=(--lr 1); fi\npython pretrain_gpt.py --num-layers 2 ${A[@]}",
        'if [ -n "$KEY" ]; then A="--lr 1"; fi\nB="$A --bf16"\npython pretrain_gpt.py --num-layers '
        "2 $B",
        "A=1\nfor i in 1 2; do\nA=$i\ndone\npython pretrain_gpt.py --num-layers $A",
        "case $HOST in\n x*) A=1;;\n *) A=2;;\nesac\npython pretrain_gpt.py --num-layers $A",
        "f() { A=3; }\nls x && f\npython pretrain_gpt.py --num-layers $A",
        "grep x y && A=1\npython pretrain_gpt.py --num-layers $A",
        'if [ -f x ]; then A=1; fi\nsrun bash -c "python pretrain_gpt.py --num-layers $A"',
    ],
)
def test_arguments_that_depend_on_unknown_values_are_rejected(script: str) -> None:
    with pytest.raises(
        ConfigError, match=r"depends on a condition at line [12] of the script.*--set"
    ):
        read_script(script, {})


def test_condition_is_decided_by_a_variable_of_the_caller() -> None:
    script = (
        'A=(--bf16)\nif [ -n "$KEY" ]; then A+=(--lr 1); fi\npython pretrain_gpt.py '
        "--num-layers 2 ${A[@]}"
    )
    assert arguments(script, KEY="") == "--num-layers 2 --bf16"
    assert arguments(script, KEY="x") == "--num-layers 2 --bf16 --lr 1"


def test_unbalanced_brackets_do_not_crash() -> None:
    assert (
        arguments("f() { fi; }\nf\nfi\ndone\n}\npython pretrain_gpt.py --num-layers 2")
        == "--num-layers 2"
    )


def test_unset_variable_is_kept_as_written() -> None:
    assert (
        arguments("python pretrain_gpt.py --num-layers 2 --data-path $DATA")
        == "--num-layers 2 --data-path ${DATA}"
    )


@pytest.mark.parametrize(
    ("command", "world"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py --bf16", 32),
        ("torchrun --nproc-per-node=2 pretrain_gpt.py --bf16", 2),
        ("python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --bf16", 4),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py --bf16", None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4 pretrain_gpt.py --bf16", None),
        ("python3 -u pretrain_gpt.py --bf16", 1),
        ("srun python pretrain_gpt.py --bf16", None),
    ],
)
def test_world_size_is_read_from_the_launcher(command: str, world: int | None) -> None:
    launch = split_command(command.split())
    assert (launch.world, launch.arguments) == (world, ("--bf16",))


def test_arguments_alone_are_arguments() -> None:
    launch = split_command(["--num-layers", "2"])
    assert (launch.program, launch.world, launch.arguments) == (None, None, ("--num-layers", "2"))


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_training_program_of_another_model_is_rejected(program: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{program} trains .* Use a command with pretrain_gpt.py"
    ):
        split_command(["torchrun", f"/x/{program}", "--bf16"])


def test_script_without_exactly_one_training_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="none of the script's 2 commands starts a training.*Pass the arguments"
    ):
        read_script("mkdir x\nls x", {})
    two = "python pretrain_gpt.py --num-layers 1\npython pretrain_gpt.py --num-layers 2"
    with pytest.raises(
        ConfigError, match="starts 2 trainings .*Pass the arguments of the one you mean"
    ):
        read_script(two, {})


# --- shell


def read(text: str) -> list[object]:
    """Tokens in short: words as texts (variables as <NAME>), operators as themselves,
    arrays as lists."""
    return [_short(token) for token in tokenize(text)]


def _short(token: object) -> object:
    if isinstance(token, Operator):
        return token.text
    if isinstance(token, ArrayLiteral):
        return [token.name, token.append, *(_short(word) for word in token.words)]
    assert isinstance(token, Word)
    return "".join(part.text if part.kind == "text" else f"<{part.text}>" for part in token.parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("a \\\n  b", ["a", "b"]),
        ("a\\\nb", ["ab"]),
        ("a # comment\nb#c", ["a", "\n", "b#c"]),
        ("'a b' \"c 'd'\" e\\ f", ["a b", "c 'd'", "e f"]),
        ("a'b'\"c\"", ["abc"]),
        ('"x\\"y\\$z"', ['x"y$z']),
        ("'$A'", ["$A"]),
        ("$A ${B} ${C:-d e} x$D.y", ["<A>", "<B>", "<C:-d e>", "x<D>.y"]),
        ("$10", ["<1>0"]),
        ("${A:-${B:-c}}", ["<A:-${B:-c}>"]),
        ("$((A * 2)) $(ls -l) `pwd`", ["<A * 2>", "<$(ls -l)>", "<`pwd`>"]),
        ("a && b || c; d | e", ["a", "&&", "b", "||", "c", ";", "d", "|", "e"]),
        ("A=(x # why\n 'y z'\n)", [["A", False, "x", "y z"]]),
        ("A+=( $B )", [["A", True, "<B>"]]),
        ("a 2>&1", ["a", "2", ">&", "1"]),
        ("cat <<EOF\n$((broken\nEOF\nb", ["cat", "<<", "\n", "\n", "b"]),
        ("a\r\nb", ["a", "\n", "b"]),
        ("echo $", ["echo", "$"]),
    ],
)
def test_script_is_split_into_tokens(text: str, expected: list[object]) -> None:
    assert read(text) == expected


def test_parts_record_quoting_and_words_their_line() -> None:
    words = [token for token in tokenize('\na\n\n$A"$B"') if isinstance(token, Word)]
    assert [word.line for word in words] == [2, 4]
    assert words[1].parts == (
        WordPart("variable", "A", False),
        WordPart("text", "", True),
        WordPart("variable", "B", True),
    )


def test_default_is_parsed_as_quoted_text() -> None:
    assert [part.text for part in split_parts("a b$C")] == ["a", " ", "b", "C"]
    assert all(part.quoted for part in split_parts("a b$C"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\na "b', 'line 2: the quote " is not closed'),
        ("a 'b", "line 1: expected a closing ', and there is none"),
        ("A=(b", r"line 1: the array that \( opens is not closed"),
        ("${A", r"\${ is not closed"),
        ("$((1", r"expected a closing \)\), and there is none"),
        ("`a", "expected a closing `, and there is none"),
    ],
)
def test_unclosed_quote_or_bracket_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


# --- variables


def word(text: str) -> Word | ArrayLiteral:
    """One word or array, as it stands in a script."""
    (token,) = tokenize(text)
    assert isinstance(token, Word | ArrayLiteral)
    return token


def variables(**values: str) -> Variables:
    """Variables that a script set, in order; a value like (a b) is an array."""
    result = Variables({"1": "first", "FIXED": "outside"})
    for name, value in values.items():
        literal = word(f"{name}={value}" if value.startswith("(") else value)
        result.assign(name, literal, append=False, active=True, line=1)
    return result


HELD = {"A": "x", "TWO": "'y z'", "EMPTY": "''", "N": "6", "LIST": "(a 'b c' d)", "NONE": "()"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("$A", ["x"]),
        ("$TWO", ["y", "z"]),
        ('"$TWO"', ["y z"]),
        ("-$TWO-", ["-y", "z-"]),
        ("$EMPTY", []),
        ('"$EMPTY"', [""]),
        ("a${EMPTY}b", ["ab"]),
        ("$LIST", ["a"]),
        ("${LIST[1]}", ["b", "c"]),
        ('"${LIST[@]}"', ["a", "b c", "d"]),
        ("${LIST[@]}", ["a", "b", "c", "d"]),
        ('"${NONE[@]}"', []),
        ("${UNSET}", ["${UNSET}"]),
        ("$UNSET/x", ["${UNSET}/x"]),
        ("${UNSET:-d}", ["d"]),
        ('${UNSET:-"d e"}', ["d", "e"]),
        ("${EMPTY:-d}", ["d"]),
        ("${EMPTY-d}", []),
        ("${A:-d}", ["x"]),
        ("${UNSET:-$A}", ["x"]),
        ("${A:+d}", ["d"]),
        ("${UNSET:+d}", []),
        ("$1", ["first"]),
        ("$2", ["${2}"]),
        ("$@", ["first"]),
        ("$#", ["1"]),
        ("$((N * 2 + 1))", ["13"]),
        ("$(($N/4))", ["1"]),
        ("$((N % 4 - 3))", ["-1"]),
        ("$((UNSET * 2))", ["$((UNSET * 2))"]),
        ("$((N / 0))", ["$((N / 0))"]),
        ("$(date)", ["$(date)"]),
        ("${A%x}", ["${A%x}"]),
        ("${#A}", ["${#A}"]),
        ("$FIXED", ["outside"]),
    ],
)
def test_words_are_expanded_as_by_a_shell(text: str, filled: list[str]) -> None:
    literal = word(text)
    assert isinstance(literal, Word)
    assert variables(**HELD).expand_word(literal) == filled


def test_variables_of_the_caller_are_not_changed() -> None:
    held = variables()
    held.assign("FIXED", word("script"), append=False, active=True, line=1)
    assert held.lookup("FIXED", None) == ["outside"]


def test_values_and_arrays_are_appended() -> None:
    held = variables(**HELD)
    held.assign("A", word('"$A y"'), append=False, active=True, line=1)
    held.assign("A", word("z"), append=True, active=True, line=1)
    held.assign("LIST", word("LIST+=($A)"), append=True, active=True, line=1)
    assert held.values["A"] == ["x yz"]
    assert held.values["LIST"] == ["a", "b c", "d", "x", "yz"]


def test_variables_that_depend_on_an_unknown_condition_are_uncertain() -> None:
    held = variables(**HELD)
    held.assign("A", word("other"), append=False, active=None, line=7)
    held.assign("B", word("$A"), append=False, active=True, line=9)
    held.assign("N", word("6"), append=False, active=None, line=11)  # the value that it has anyway
    assert held.uncertain == {"A": 7, "B": 7}
    held.assign("A", word("sure"), append=False, active=True, line=12)
    assert held.uncertain == {"B": 7}


@pytest.mark.parametrize(
    ("test", "answer"),
    [
        ("[ $A = x ]", True),
        ('[[ "$A" == "y" ]]', False),
        ("[[ $A != y ]]", True),
        ("[[ $A == x* ]]", True),
        ('[ -z "$EMPTY" ]', True),
        ('[ -n "$EMPTY" ]', False),
        ("[[ ! -n $A ]]", False),
        ("[[ -n $UNSET ]]", None),
        ("[ $N -gt 5 ]", True),
        ("[ $N -eq 5 ]", False),
        ("test $N -le 6", True),
        ("[ $A -eq 5 ]", None),
        ("[ -f file ]", None),
        ("[[ $A =~ x.* ]]", None),
        ("[ $UNSET = x ]", None),
        ("[[ $1 == first ]]", True),
    ],
)
def test_test_command_is_evaluated_if_its_words_are_known(test: str, answer: bool | None) -> None:
    words = [token for token in tokenize(test) if isinstance(token, Word)]
    assert variables(**HELD).test(words) is answer


def test_variables_of_a_word_are_listed() -> None:
    literal = word('a$B"${C:-d}${E[@]}"')
    assert isinstance(literal, Word)
    assert variable_names(literal) == ["B", "C", "E"]
