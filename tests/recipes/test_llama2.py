"""The published sizes of Llama 2."""

from megalith.models.llama import read_config
from megalith.models.usual import canonical
from megalith.plan.advice import verdict
from megalith.plan.costs import num_parameters
from megalith.plan.devices import DEVICES
from megalith.plan.memory import memory_ledger, worst
from megalith.plan.workload import plan_workload
from megalith.recipes.llama2 import llama2_7b, llama2_70b
from tests.models.test_llama import PUBLISHED


def test_the_7b_model_is_the_one_that_its_authors_published() -> None:
    raw, parameters = PUBLISHED["Llama-2-7b"]
    assert canonical(llama2_7b().model) == canonical(read_config(raw))
    assert num_parameters(llama2_7b().model) == parameters == 6_738_415_616


def test_the_70b_model_has_its_published_number_of_parameters() -> None:
    assert num_parameters(llama2_70b().model) == 68_976_648_192


def test_a_step_has_four_million_tokens_and_the_run_two_trillion() -> None:
    for run in (llama2_7b(), llama2_70b()):
        tokens = run.train.global_batch_size * run.train.seq_len
        assert tokens == 2**22 and round(tokens * run.train.steps / 1e9) == 2001
        assert (run.optim.eps, run.schedule.warmup_steps, run.schedule.min_lr * 10) == (1e-5, 2000, run.schedule.lr)


def test_the_70b_model_fits_sixteen_nodes_and_not_one() -> None:
    found = {}
    for world in (8, 128):
        held = worst(memory_ledger(plan_workload(llama2_70b(), world), DEVICES["h100"])).memory.total
        found[world] = verdict(held, DEVICES["h100"])
    assert found[128] == "fits" and found[8] != "fits"
