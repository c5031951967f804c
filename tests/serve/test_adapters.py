"""LoRA adapters over HTTP: requests name them as models; they are listed, loaded and unloaded."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from megalith.cli.main import main
from megalith.config.generation import SamplingParams
from megalith.infer.adapters import ReplacedAdapterError
from megalith.infer.llm import LLM
from megalith.serve.engine_server import find_status
from tests.infer.lora_folders import save_adapter, save_peft_adapter
from tests.serve.servers import Server, running_server

PROMPT = "The quick brown fox"
GREEDY = {"temperature": 0, "max_tokens": 24}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two adapters of the model: a checkpoint and a PEFT folder."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": save_adapter(folder / "a", run, seed=1),
        "b": save_peft_adapter(folder / "b", run, seed=2),
    }


def options(adapters: dict[str, Path]) -> list[str]:
    """Options of a server that holds two adapters, one of them from the start."""
    return [
        *("--served-model-name", "tiny", "--template", "chatml", "--api-key", "one"),
        *("--enable-admin", "--engine.max_adapters", "2"),
        *("--engine.adapters", f"a={adapters['a']}"),
    ]


@pytest.fixture(scope="module")
def adapted(run: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    with running_server(run, *options(adapters)) as server:
        server.client.headers["Authorization"] = "Bearer one"
        yield server


def complete(server: Server, model: str, **fields: Any) -> str:
    body = {"model": model, "prompt": PROMPT} | GREEDY | fields
    answer = server.post("/v1/completions", body).raise_for_status().json()
    assert answer["model"] == model
    text: str = answer["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected(run: Path, adapters: dict[str, Path]) -> dict[str, str]:
    """Greedy text of the base model and of the models with an adapter merged."""
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    paths = {"tiny": run} | adapters
    return {
        name: LLM(path).generate([PROMPT], params)[0].outputs[0].text
        for name, path in paths.items()
    }


def change(server: Server, path: str, **fields: Any) -> httpx2.Response:
    return server.post(path, fields)


def test_requests_of_one_batch_name_the_model_or_an_adapter(
    adapted: Server, adapters: dict[str, Path], expected: dict[str, str]
) -> None:
    assert len(set(expected.values())) == 3
    loaded = change(adapted, LOAD, lora_name="b", lora_path=str(adapters["b"]))
    assert loaded.status_code == 200 and loaded.json() == {"status": "ok"}
    results: list[tuple[str, str]] = []

    def run_one(name: str) -> None:
        body = {"model": name, "prompt": PROMPT} | GREEDY
        headers = {"Authorization": "Bearer one"}
        answer = httpx2.post(
            f"{adapted.url}/v1/completions", json=body, headers=headers, timeout=60
        )
        results.append((name, answer.json()["choices"][0]["text"]))

    threads = [threading.Thread(target=run_one, args=(name,)) for name in [*expected] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([*expected.items()] * 4)
    unloaded = change(adapted, UNLOAD, lora_name="b")
    assert unloaded.status_code == 200 and unloaded.json() == {"status": "ok"}


def test_openai_client_uses_adapters(
    adapted: Server, adapters: dict[str, Path], expected: dict[str, str]
) -> None:
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="one", max_retries=0) as client:
        base, adapter = client.models.list().data
        assert (base.id, base.to_dict()["parent"]) == ("tiny", None)
        described = adapter.to_dict()
        assert (adapter.id, described["parent"], described["root"]) == (
            "a",
            "tiny",
            str(adapters["a"]),
        )
        assert client.models.retrieve("a").id == "a"
        stream = client.completions.create(
            model="a", prompt=PROMPT, temperature=0, max_tokens=24, stream=True
        )
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {"a"}
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected["a"]
        messages: Any = [{"role": "user", "content": "hi"}]
        texts = {
            client.chat.completions.create(model=name, messages=messages, **GREEDY)  # type: ignore[call-overload]  # a dictionary of options
            .choices[0]
            .message.content
            for name in ("tiny", "a")
        }
        assert len(texts) == 2
        answers = {
            client.responses.create(model=name, input="hi", temperature=0).output_text
            for name in ("tiny", "a")
        }
        assert len(answers) == 2
        vectors = [
            client.embeddings.create(model=name, input="hi").data[0].embedding
            for name in ("tiny", "a")
        ]
        assert vectors[0] != vectors[1]
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="c", prompt="x")
        assert caught.value.code == "model_not_found"
        assert "model='c': this server has no such model. Use 'tiny', 'a'." in str(caught.value)


def test_reloaded_adapter_uses_no_blocks_of_its_old_weights(
    adapted: Server, adapters: dict[str, Path], expected: dict[str, str]
) -> None:
    assert complete(adapted, "a") == expected["a"]
    change(adapted, LOAD, lora_name="a", lora_path=str(adapters["b"])).raise_for_status()
    assert complete(adapted, "a") == expected["b"]
    assert adapted.get("/v1/models/a").json()["root"] == str(adapters["b"])
    change(adapted, LOAD, lora_name="a", lora_path=str(adapters["a"])).raise_for_status()
    assert complete(adapted, "a") == expected["a"]


def test_unloaded_adapter_is_no_model_any_more(adapted: Server, adapters: dict[str, Path]) -> None:
    change(adapted, LOAD, lora_name="x", lora_path=str(adapters["b"])).raise_for_status()
    assert [one["id"] for one in adapted.get("/v1/models").json()["data"]] == ["tiny", "a", "x"]
    change(adapted, UNLOAD, lora_name="x").raise_for_status()
    assert adapted.get("/v1/models/x").status_code == 404
    answer = adapted.post("/v1/completions", {"model": "x", "prompt": "x"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "fields", "status", "text"),
    [
        (LOAD, {}, 400, "lora_name=None must be a text, such as 'sql'."),
        (LOAD, {"lora_name": 3, "lora_path": "x"}, 400, "lora_name=3 must be a text"),
        (LOAD, {"lora_name": "x"}, 400, "lora_path=None must be a text, such as 'runs/lora_sql'"),
        (LOAD, {"lora_name": "tiny", "lora_path": "x"}, 400, "is the name of the base model. Use"),
        (LOAD, {"lora_name": "x", "lora_path": "/absent"}, 400, "/absent: no such folder"),
        (UNLOAD, {"lora_name": ""}, 400, "lora_name='' must be a text"),
        (UNLOAD, {"lora_name": "x"}, 404, "adapter='x': there is no such adapter. Loaded: a."),
    ],
)
def test_invalid_changes_are_rejected(
    adapted: Server, path: str, fields: dict[str, Any], status: int, text: str
) -> None:
    response = adapted.post(path, fields)
    assert response.status_code == status and text in response.json()["error"]["message"]


def test_request_is_rejected_while_all_adapters_are_used(
    adapted: Server, adapters: dict[str, Path]
) -> None:
    for name in ("b", "c"):
        change(adapted, LOAD, lora_name=name, lora_path=str(adapters["b"])).raise_for_status()
    change(adapted, UNLOAD, lora_name="c").raise_for_status()
    adapted.post("/pause").raise_for_status()
    headers = {"Authorization": "Bearer one"}
    answers: list[httpx2.Response] = []

    def run_one(name: str) -> None:
        body = {"model": name, "prompt": "x", "max_tokens": 2}
        url = f"{adapted.url}/v1/completions"
        answers.append(httpx2.post(url, json=body, headers=headers, timeout=60))

    threads = [threading.Thread(target=run_one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    while adapted.metrics()["num_requests_waiting"] < 2:
        pass
    response = change(adapted, LOAD, lora_name="c", lora_path=str(adapters["a"]))
    adapted.post("/resume").raise_for_status()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert response.status_code == 429
    assert "all max_adapters=2 adapters in memory have requests" in response.text
    change(adapted, UNLOAD, lora_name="b").raise_for_status()


def test_control_endpoints_of_adapters_need_the_option_and_the_key(
    server: Server, adapted: Server
) -> None:
    response = server.post(LOAD, {"lora_name": "x", "lora_path": "x"})
    assert response.status_code == 404
    assert f"{LOAD} needs the server option --enable-admin." in response.text
    wrong = {"Authorization": "Bearer two"}
    response = adapted.post(UNLOAD, {"lora_name": "a"}, headers=wrong)
    assert response.status_code == 401


def test_ranks_load_and_use_adapters(
    run: Path, adapters: dict[str, Path], expected: dict[str, str]
) -> None:
    with running_server(run, "--nproc", "2", *options(adapters)) as ranks:
        ranks.client.headers["Authorization"] = "Bearer one"
        assert complete(ranks, "a") == expected["a"]
        failed = change(ranks, LOAD, lora_name="b", lora_path="/absent")
        assert failed.status_code == 400 and "no such folder" in failed.text
        change(ranks, LOAD, lora_name="b", lora_path=str(adapters["b"])).raise_for_status()
        assert complete(ranks, "b") == expected["b"]
        assert complete(ranks, "tiny") == expected["tiny"]
        assert ranks.stop() == 0, ranks.lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine.adapters", "tiny=x"], "tiny is the name of the base model. Use another name"),
        (["--engine.adapters", "a"], "adapters=a: must be NAME=FOLDER"),
        (["--engine.adapters", "a=/absent"], "/absent: no such folder"),
    ],
)
def test_invalid_adapters_end_the_server(
    words: list[str], message: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", str(run), "--port", "0", "--served-model-name", "tiny"]
    assert main([*arguments, "--engine.max_adapters", "1", *words]) == 2
    assert message in capfd.readouterr().err


def test_replaced_weights_of_a_continued_request_are_a_conflict() -> None:
    assert find_status(ReplacedAdapterError()) == 409
