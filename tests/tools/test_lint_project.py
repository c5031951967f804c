"""Every rule of the project linter finds its fault, and leaves the right form alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.lint_project import PACKAGE_RULES, RULES, findings, markdown_findings, parse

ROOT = Path(__file__).resolve().parents[2]
AUTOGRAD = "from torch.autograd import Function\n"
DIST = "import torch.distributed as dist\n"
LONG = "def long() -> None:\n" + "    x = 1\n" * 54
TOO_LONG = LONG + "    x = 1\n"

FAULTS = [
    ("bare-except", "megalith/a.py", "try:\n    f()\nexcept:\n    g()"),
    ("eval-exec", "tools/a.py", "eval(text)"),
    ("eval-exec", "tests/a.py", "exec('x = 1')"),
    ("shell", "megalith/a.py", "subprocess.run('ls', shell=True)"),
    ("shell", "megalith/a.py", "import os\nos.system('ls')"),
    ("yaml-load", "megalith/a.py", "import yaml\nyaml.load(text)"),
    ("yaml-load", "megalith/a.py", "import yaml\nyaml.load(text, Loader=yaml.Loader)"),
    ("yaml-load", "megalith/a.py", "from yaml import unsafe_load\nunsafe_load(text)"),
    ("torch-load", "megalith/a.py", "import torch\ntorch.load(path)"),
    ("torch-load", "megalith/a.py", "from torch import load\nload(path, weights_only=False)"),
    ("pickle-load", "megalith/a.py", "import pickle\npickle.loads(data)"),
    ("pickle-load", "megalith/a.py", "from pickle import Unpickler as U\nU(file)"),
    ("cuda-literal", "megalith/nn/a.py", "x.to('cuda:1')"),
    ("cuda-literal", "megalith/nn/a.py", "if x.device.type == 'cuda':\n    f()"),
    ("collectives", "megalith/train/a.py", DIST + "dist.all_reduce(x, group=g)"),
    (
        "collectives",
        "megalith/train/a.py",
        "from torch.distributed import new_group\nnew_group([0])",
    ),
    ("collectives", "megalith/optim/a.py", "import torch\n_ops = torch.ops._c10d_functional"),
    ("collectives", "megalith/optim/a.py", "import torch.distributed._functional_collectives as f"),
    ("explicit-group", "megalith/parallel/a.py", DIST + "dist.all_reduce(x)"),
    ("explicit-group", "megalith/parallel/a.py", DIST + "dist.barrier(group=None)"),
    (
        "rank-branch",
        "megalith/parallel/a.py",
        DIST + "if group.rank == 0:\n    dist.barrier(group=g)",
    ),
    (
        "rank-branch",
        "megalith/a.py",
        "from megalith.parallel.group import barrier\nif rank:\n    pass\nelse:\n    barrier(g)",
    ),
    ("checker-import", "megalith/parallel/a.py", "def f():\n    import spmd_types"),
    ("checker-import", "megalith/verify/report.py", "from spmd_types.types import R"),
    ("untyped-function", "megalith/nn/a.py", AUTOGRAD + "class F(Function):\n    x = 1"),
    (
        "untyped-function",
        "megalith/nn/a.py",
        "import torch\nclass F(torch.autograd.Function):\n    pass",
    ),
    ("no-typecheck", "tests/a.py", "import s\nwith s.no_typecheck():\n    f()"),
    ("no-typecheck", "megalith/verify/types.py", "from spmd_types import no_typecheck as n"),
    ("optional-import", "megalith/hf/folder.py", "import transformers"),
    (
        "optional-import",
        "megalith/observe/a.py",
        "from torch.utils.tensorboard import SummaryWriter",
    ),
    ("module-state", "megalith/a.py", "CACHE: dict[str, int] = {}"),
    (
        "module-state",
        "megalith/a.py",
        "from collections import defaultdict\nseen = defaultdict(list)",
    ),
    ("module-state", "megalith/a.py", "def f():\n    global x\n    x = 1"),
    ("module-state", "megalith/a.py", "def f():\n    n = 0\n    def g():\n        nonlocal n"),
    ("hot-path", "megalith/a.py", "# hot-path\nloss = x.item()"),
    ("hot-path", "megalith/a.py", "import torch\n# hot-path\ntorch.cuda.synchronize()"),
    ("vague-name", "megalith/nn/utils.py", "x = 1"),
    ("long-function", "benchmarks/a.py", TOO_LONG),
    ("long-file", "tests/a.py", "x = 1\n" * 561),
    ("old-word", "megalith/nn/a.py", "class FurtherLoss:\n    x = 1"),
    ("old-word", "tests/a.py", "def test_what_is_told():\n    f()"),
    ("old-word", "benchmarks/a.py", "raise ValueError(f'{n} holders')"),
    ("old-word", "megalith/train/a.py", '"""Weights and masters."""'),
    ("old-word", "megalith/train/exposure.py", "x = 1"),
    ("old-word", "megalith/plan/a.py", "def deal(lengths):\n    return lengths"),
    ("old-word", "megalith/kernels/a.py", "class _Products:\n    x = 1"),
    ("old-word", "megalith/parallel/a.py", "class BucketSink:\n    x = 1"),
    ("old-word", "megalith/kernels/a.py", "NAMES = ('sdpa', 'loops')"),
    ("old-setting", "tests/a.py", "run('model.moe.experts=8')"),
    ("old-setting", "megalith/config/a.py", "class RouterConfig:\n    top_groups: int = 1"),
    ("old-setting", "megalith/a.py", '"""First line.\n\nSets data.documents.\n"""'),
    ("british-spelling", "megalith/a.py", "def initialise():\n    f()"),
    ("british-spelling", "tests/a.py", "x = 'two neighbours'"),
    ("british-spelling", "megalith/a.py", '"""First line.\n\nValues are centred.\n"""'),
    ("format-skip", "megalith/a.py", "x = (1,\n     2)  # fmt: " + "skip"),
    ("vague-class", "megalith/a.py", "class _Kept:\n    x = 1"),
    ("vague-variable", "megalith/a.py", "found = f()"),
    ("vague-variable", "megalith/a.py", "def f(mine):\n    g()"),
    ("vague-variable", "megalith/a.py", "for there in x:\n    g()"),
    ("vague-variable", "megalith/a.py", "y = [g(theirs) for theirs in x]"),
]

CLEAN = [
    ("megalith/a.py", "try:\n    f()\nexcept ValueError:\n    g()"),
    ("megalith/a.py", "model.eval()\nast.literal_eval(text)"),
    ("megalith/a.py", "subprocess.run(['ls'], shell=False)"),
    ("megalith/a.py", "import yaml\nyaml.safe_load(text)\nyaml.load(text, Loader=OurSafeLoader)"),
    ("megalith/a.py", "import torch\ntorch.load(path, weights_only=True)"),
    ("megalith/a.py", "import json\njson.loads(data)"),
    ("tests/a.py", "import pickle\npickle.loads(pickle.dumps(x))"),
    ("tests/a.py", "x.to('cuda')"),
    ("megalith/nn/a.py", "x.is_cuda\n'cuda graphs'"),
    ("megalith/parallel/a.py", DIST + "dist.all_reduce(x, group=group.handle)"),
    ("megalith/observe/a.py", "import torch\nhasattr(torch.ops._c10d_functional, 'all_reduce')"),
    ("megalith/observe/machine.py", "device = 'cuda'"),
    ("megalith/checkpoint/a.py", "import torch.distributed.checkpoint as dcp\ndcp.save(state)"),
    (
        "megalith/train/a.py",
        "from megalith.parallel.group import all_reduce_\nall_reduce_(x, group)",
    ),
    ("megalith/parallel/a.py", DIST + "if group.rank == 0:\n    dist.send(x, 1, group=g)"),
    ("megalith/verify/types.py", "import spmd_types"),
    ("megalith/parallel/a.py", AUTOGRAD + "class F(Function):\n    moves: ClassVar = ('R', 'P')"),
    ("megalith/kernels/a.py", AUTOGRAD + "class F(Function):\n    reference = staticmethod(plain)"),
    ("megalith/nn/a.py", AUTOGRAD + "@typed_by(plain)\nclass F(Function):\n    pass"),
    ("megalith/hf/folder.py", "def load():\n    import transformers"),
    ("megalith/a.py", "TABLE = {'a': 1}\nNAMES = ()\ndef f():\n    seen = {}"),
    ("megalith/a.py", "# hot-path\nloss = x.item()  # sync-ok: once per step, after backward"),
    ("megalith/a.py", "loss = x.item()"),
    ("tests/common.py", "x = 1"),
    ("megalith/a.py", LONG),
    ("megalith/a.py", "x = 1\n" * 560),
    ("megalith/a.py", '"""First line.\n\nA further line may say what is told.\n"""'),
    ("megalith/infer/a.py", "def deal(lengths):\n    return lengths"),
    ("megalith/data/a.py", "draw = key(seed, 'sft', 'made up', number)"),
    ("megalith/config/megatron/a.py", "x = '--mid-level-dataset-surplus'"),
    ("megalith/nn/a.py", "def init(p):\n    p.register('balancing_bias')"),
    ("megalith/models/a.py", "x = 'layers.1.moe.experts.up'"),
    ("megalith/plan/a.py", "x = f'moe.experts.{name}'"),
    ("megalith/config/a.py", "class MoEConfig:\n    num_experts: int = 1\n    mtp: int = 1"),
    ("megalith/nn/a.py", "class AttentionSink:\n    x = 1"),
    ("megalith/a.py", "x = 'four precise hours, otherwise noise: raise, advertised, rowwise'"),
    ("megalith/a.py", "x = 'a line with # fmt: skip in a text'"),
    ("tests/a.py", "found = f()"),
    ("megalith/a.py", "f(found=1)\nx.mine = 1"),
]


@pytest.mark.parametrize(("rule", "path", "text"), FAULTS)
def test_violation_is_reported_only_by_its_rule(rule: str, path: str, text: str) -> None:
    result = findings(parse(path, text))
    assert {line.split(": ")[1] for line in result} == {rule}
    assert result[0].startswith(f"{path}:")


def test_a_class_name_in_two_files_of_the_package_is_found_in_the_second() -> None:
    text = "class Layer:\n    x = 1"
    first, second, test = (
        parse(path, text) for path in ("megalith/a.py", "megalith/b.py", "tests/a.py")
    )
    assert findings(first, second, test) == [
        "megalith/b.py:1: repeated-class: class Layer is also in megalith/a.py:1. Use another name "
        "for one of them."
    ]
    assert findings(first, test) == []


def test_old_words_in_markdown_code_are_reported_and_prose_is_ignored() -> None:
    text = "Further words.\n`FurtherLoss` and `parallel.rings=true`\n```\nholders = 2\n```\nholders"
    assert markdown_findings("docs/a.md", text) == [
        'docs/a.md:2: old-word: name FurtherLoss: old word "further". Use mtp.',
        'docs/a.md:2: old-setting: old setting "parallel.rings". Use parallel.tp_comm_overlap.',
        'docs/a.md:4: old-word: name holders: old word "holders". Use replicas or replica_ranks.',
    ]
    assert markdown_findings("docs/log.md", text) == []


@pytest.mark.parametrize(("path", "text"), CLEAN)
def test_correct_form_is_accepted(path: str, text: str) -> None:
    assert findings(parse(path, text)) == []


def test_every_rule_has_an_example_that_it_reports() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_a_finding_is_waived_by_its_rule_and_a_reason_only() -> None:
    assert findings(parse("a.py", "eval(x)  # lint: allow eval-exec: x is ours")) == []
    assert len(findings(parse("a.py", "eval(x)  # lint: allow eval-exec:"))) == 1
    assert len(findings(parse("a.py", "eval(x)  # lint: allow shell: x is ours"))) == 1


def test_a_finding_names_file_line_rule_and_what_to_do() -> None:
    assert findings(parse("megalith/a.py", "import torch\ntorch.load(path)")) == [
        "megalith/a.py:2: torch-load: torch.load unpickles. Pass weights_only=True."
    ]


def test_the_command_counts_its_findings_and_ends_with_one(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("eval(x)\n")
    command = [sys.executable, "tools/lint_project.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "bad.py:1: eval-exec" in done.stdout
    assert done.stdout.endswith(f"1 files, {len(RULES) + len(PACKAGE_RULES)} rules, 1 findings\n")
