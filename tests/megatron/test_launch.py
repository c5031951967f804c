"""Tests of megalith/megatron/launch.py."""

import pytest

from megalith.errors import ConfigError
from megalith.megatron.launch import OTHER_PROGRAMS, read_script, split_command

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


def test_variables_and_arrays_of_a_script_are_filled_in() -> None:
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


def test_variables_set_from_outside_win_over_the_script() -> None:
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
def test_the_branch_whose_condition_holds_is_taken(kind: str, expected: str) -> None:
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
        ConfigError, match=r"is changed under a condition, at line 1.*--set|at line 2.*--set"
    ):
        read_script(script, {})


def test_a_condition_can_be_decided_from_outside() -> None:
    script = (
        'A=(--bf16)\nif [ -n "$KEY" ]; then A+=(--lr 1); fi\npython pretrain_gpt.py '
        "--num-layers 2 ${A[@]}"
    )
    assert arguments(script, KEY="") == "--num-layers 2 --bf16"
    assert arguments(script, KEY="x") == "--num-layers 2 --bf16 --lr 1"


def test_brackets_that_do_not_match_are_no_crash() -> None:
    assert (
        arguments("f() { fi; }\nf\nfi\ndone\n}\npython pretrain_gpt.py --num-layers 2")
        == "--num-layers 2"
    )


def test_an_unset_variable_stays_visible() -> None:
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
def test_the_ranks_of_a_job_are_read_off_its_launcher(command: str, world: int | None) -> None:
    launch = split_command(command.split())
    assert (launch.world, launch.arguments) == (world, ("--bf16",))


def test_arguments_alone_are_arguments() -> None:
    launch = split_command(["--num-layers", "2"])
    assert (launch.program, launch.world, launch.arguments) == (None, None, ("--num-layers", "2"))


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_a_training_of_another_kind_is_refused_by_name(program: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{program} trains .* Use a command with pretrain_gpt.py"
    ):
        split_command(["torchrun", f"/x/{program}", "--bf16"])


def test_a_script_without_one_training_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="none of the script's 2 commands starts a training.*Pass the arguments"
    ):
        read_script("mkdir x\nls x", {})
    two = "python pretrain_gpt.py --num-layers 1\npython pretrain_gpt.py --num-layers 2"
    with pytest.raises(
        ConfigError, match="starts 2 trainings .*Pass the arguments of the one you mean"
    ):
        read_script(two, {})
