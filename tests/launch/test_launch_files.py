"""The files under launch/: read, and their scripts run with stand-ins for srun, scontrol, torchrun
and megalith."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

import pytest
import yaml

from megalith.observe.limits import HOST
from megalith.testing.tiny import tiny_yaml

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SLURM = LAUNCH / "slurm.sh"


def tool(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program: a bash script on the path."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def run_script(folder: Path, words: list[str], **variables: str) -> "subprocess.Popen[str]":
    """Start bash with the stand-ins first on its path."""
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "T": str(folder),
    }
    return subprocess.Popen(
        ["bash", *words],
        cwd=folder,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def wait_for_output(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output of a script, which must end."""
    try:
        out, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert err == ""
    return process.returncode, out


# --- Slurm


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two tasks per srun; each says who it is and ends with the code in CODE0 or CODE1; srun
    returns the largest."""
    tool(
        tmp_path,
        "scontrol",
        'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> "$T/asked"; fi',
    )
    tool(
        tmp_path,
        "srun",
        'while [[ "$1" == --* ]]; do shift; done; most=0\n'
        "for task in 0 1; do\n"
        '  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 "$@"; '
        "code=$?\n  if [ $code -gt $most ]; then most=$code; fi\n"
        "done; exit $most",
    )
    tool(
        tmp_path,
        "megalith",
        'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $*"\n'
        'name=CODE$RANK; exit "${!name}"',
    )
    return tmp_path


def slurm(folder: Path, *codes: int) -> tuple[int, str]:
    """Run the batch script with tasks that end with these codes."""
    variables = {f"CODE{rank}": str(code) for rank, code in enumerate(codes)}
    job = {
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    return wait_for_output(
        run_script(folder, [str(SLURM), "tiny", "--run", "my run"], **job, **variables)
    )


def test_every_slurm_task_gets_its_rank_and_the_master_address(cluster: Path) -> None:
    code, out = slurm(cluster, 0, 0)
    assert code == 0 and not (cluster / "asked").exists()
    assert out.splitlines() == [
        f"{rank}/2 {rank}/2 node7:20041 train tiny --run my run" for rank in (0, 1)
    ]


def test_a_slurm_job_that_stopped_after_a_save_asks_to_be_queued_again(cluster: Path) -> None:
    assert slurm(cluster, 75, 75)[0] == 75
    assert (cluster / "asked").read_text() == "requeue 41\n"


def test_slurm_job_of_a_suspect_machine_is_submitted_again_without_it(cluster: Path) -> None:
    tool(cluster, "sbatch", 'printf "%s\\n" "$@" > "$T/submitted"')
    suspects = cluster / "slurm-41.suspects"
    suspects.write_text("node7,node9\n")
    assert slurm(cluster, 76, 76)[0] == 76
    words = (cluster / "submitted").read_text().splitlines()
    assert words[:2] == ["--exclude=node7,node9", "--nodes=2"]
    assert words[2] == str(SLURM) and words[3:] == ["tiny", "--run", "my run"]
    assert not (cluster / "asked").exists()


@pytest.mark.parametrize("codes", [(1, 1), (2, 2), (75, 137), (0, 1), (76, 76)])
def test_a_slurm_job_that_failed_stays_failed(cluster: Path, codes: tuple[int, int]) -> None:
    assert slurm(cluster, *codes)[0] == max(codes)
    assert not (cluster / "asked").exists()


def test_slurm_warns_every_rank_before_its_time_is_up() -> None:
    options = [
        line.split(None, 1)[1]
        for line in SLURM.read_text().splitlines()
        if line.startswith("#SBATCH")
    ]
    assert {"--signal=TERM@300", "--requeue", "--open-mode=append"} <= set(options)
    per_node = {key: value for key, _, value in (option.partition("=") for option in options)}
    assert per_node["--ntasks-per-node"] == per_node["--gpus-per-node"], "one rank for each GPU"


# --- Kubernetes


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """Kind -> manifest."""
    return {
        one["kind"]: one for one in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    }


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A torchrun that obeys the signals torchrun does and starts two ranks, each ending with CODE,
    or when told."""
    tool(
        tmp_path,
        "torchrun",
        'echo "$@" > "$T/words"; while [ "$1" != -- ]; do shift; done; shift\n'
        'set -m; ranks=(); for rank in 0 1; do "$@" & ranks+=($!); done\n'
        "trap 'for rank in ${ranks[@]}; do kill -TERM -- -$rank; done; stopping=1' TERM\n"
        'touch "$T/ready"; worst=0\n'
        "for rank in ${ranks[@]}; do\n"
        "  wait $rank; code=$?; while kill -0 $rank 2>/dev/null; do wait $rank; code=$?; done\n"
        "  if [ $code -ne 0 ]; then worst=1; fi\n"
        "done; exit ${stopping:-$worst}",
    )
    tool(
        tmp_path,
        "megalith",
        "exec 2> /dev/null; trap 'echo saved; exit 75' TERM; echo \"$@\"\n"
        'if [ "$CODE" = wait ]; then for _ in {1..100}; do sleep 0.1; done; fi; exit "$CODE"',
    )
    return tmp_path


def container(manifests: dict[str, Any]) -> dict[str, Any]:
    """The one container of the job's pods."""
    (only,) = manifests["Job"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def start_pod(folder: Path, manifests: dict[str, Any], code: str) -> "subprocess.Popen[str]":
    """Run the container's command with ranks that end with `code`."""
    only = container(manifests)
    assert only["command"] == ["bash", "-c"]
    variables = {entry["name"]: entry["value"] for entry in only["env"] if "value" in entry}
    variables["LAUNCH_FOLDER"] = str(folder)
    return run_script(folder, ["-c", *only["args"]], CODE=code, **variables)


@pytest.mark.parametrize(
    "rank, expected", [("0", 0), ("1", 1), ("2", 2), ("75", 75), ("76", 76), ("137", 1)]
)
def test_pod_has_the_exit_code_of_its_ranks(
    pod: Path, manifests: dict[str, Any], rank: str, expected: int
) -> None:
    code, out = wait_for_output(start_pod(pod, manifests, rank))
    assert code == expected
    assert out.splitlines() == ["train llama3_70b --run=long"] * 2


class ApiServer(BaseHTTPRequestHandler):
    """A stand-in for the server of the Kubernetes API that records the pods it creates."""

    pods: ClassVar[list[dict[str, Any]]] = []
    headers_of_last: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, int]] = {}
    """Status of the answer by node, if it is not 201."""

    def do_POST(self) -> None:
        """Create a pod."""
        pod = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ApiServer.headers_of_last = dict(self.headers)
        ApiServer.pods.append({"path": self.path, **pod})
        self.send_response(self.refused.get(pod["spec"]["nodeName"], 201))
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


@pytest.fixture
def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ApiServer]]:
    """The API at a local port, and a service account for it."""
    for name, text in (("token", "secret\n"), ("namespace", "research")):
        (tmp_path / name).write_text(text)
    ApiServer.pods, ApiServer.refused = [], {}
    with HTTPServer(("127.0.0.1", 0), ApiServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("SERVICE_ACCOUNT", str(tmp_path))
        monkeypatch.setenv("API_SERVER", f"http://127.0.0.1:{server.server_port}")
        yield ApiServer
        server.shutdown()
        thread.join()


def start_suspect_pod(
    folder: Path, manifests: dict[str, Any], nodes: str
) -> "subprocess.Popen[str]":
    """Run the container's command with a rank 0 that reports suspect nodes."""
    (folder / "reserve_nodes.py").write_text(manifests["ConfigMap"]["data"]["reserve_nodes.py"])
    tool(folder, "megalith", f'echo {nodes} > "$MEGALITH_SUSPECTS"; exit 76')
    return start_pod(folder, manifests, "76")


def test_suspect_nodes_are_reserved_and_avoided(
    pod: Path, manifests: dict[str, Any], api_server: type[ApiServer]
) -> None:
    code, out = wait_for_output(start_suspect_pod(pod, manifests, "node7.example,node9"))
    assert code == 76
    assert out.count(" is suspect: pod megalith-suspect-") == 2
    assert api_server.headers_of_last["Authorization"] == "Bearer secret"
    assert {each["path"] for each in api_server.pods} == {"/api/v1/namespaces/research/pods"}
    assert [each["spec"]["nodeName"] for each in api_server.pods] == ["node7.example", "node9"]
    assert len({each["metadata"]["name"] for each in api_server.pods}) == 2
    template = manifests["Job"]["spec"]["template"]
    (avoided,) = template["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert avoided["topologyKey"] == "kubernetes.io/hostname"
    labels = avoided["labelSelector"]["matchLabels"]
    for each in api_server.pods:
        assert each["metadata"]["labels"] == labels
        assert each["spec"]["containers"][0]["image"].startswith("registry.k8s.io/pause:")
    assert not labels.items() <= template["metadata"]["labels"].items()


def test_nodes_that_cannot_be_reserved_are_named(
    pod: Path, manifests: dict[str, Any], api_server: type[ApiServer]
) -> None:
    api_server.refused = {"node7": 409, "node8": 403}
    code, out = wait_for_output(start_suspect_pod(pod, manifests, "node7,node8"))
    assert code == 76
    assert "node7" not in out  # it is reserved already
    text = "node node8 is suspect and cannot be reserved: HTTP Error 403: Forbidden; use kubectl"
    assert out == f"{text} cordon node8\n"


def test_pods_may_create_pods_and_report_the_names_of_nodes(manifests: dict[str, Any]) -> None:
    account = manifests["ServiceAccount"]["metadata"]["name"]
    assert manifests["Job"]["spec"]["template"]["spec"]["serviceAccountName"] == account
    binding = manifests["RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["name"] == manifests["Role"]["metadata"]["name"]
    assert manifests["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    ]
    only = container(manifests)
    sources = {entry["name"]: entry.get("valueFrom") for entry in only["env"]}
    assert sources[HOST] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    (mount,) = [each for each in only["volumeMounts"] if each["name"] == "launch"]
    folders = {entry["name"]: entry.get("value") for entry in only["env"]}
    assert folders["LAUNCH_FOLDER"] == mount["mountPath"]


def test_terminated_pod_lets_its_ranks_save(pod: Path, manifests: dict[str, Any]) -> None:
    process = start_pod(pod, manifests, "wait")
    deadline = time.monotonic() + 10
    while not (pod / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # the ranks' own traps
    os.kill(process.pid, signal.SIGTERM)
    code, out = wait_for_output(process)
    assert code == 75
    assert out.count("saved") == 2


@pytest.mark.slow  # twice torchrun and two ranks, each of which imports torch
def test_run_under_the_pod_script_stops_with_75_and_resumes(
    tmp_path: Path, manifests: dict[str, Any]
) -> None:
    tool(tmp_path, "megalith", f'exec {quote(sys.executable)} -m megalith "$@"')
    tool(
        tmp_path,
        "torchrun",
        f'exec {quote(sys.executable)} -m torch.distributed.run --local-addr 127.0.0.1 "$@"',
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = container(manifests)["args"][0].replace(
        "megalith-0.megalith:29400", f"localhost:{port}"
    )
    words = [
        "-c",
        script,
        "train",
        str(tiny_yaml(tmp_path / "tiny.yaml")),
        "--run",
        str(tmp_path / "run"),
    ]
    place = {"NODES": "1", "RANKS_PER_NODE": "2", "PYTHONPATH": str(LAUNCH.parent)}
    for limit, code, expected_words in (
        (["--train.max_minutes", "0"], 75, "and saved"),
        ([], 0, "done at step 8"),
    ):
        process = run_script(tmp_path, [*words, *limit], **place)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert (process.returncode, expected_words in out) == (code, True), out + err


def test_pods_rendezvous_at_the_address_of_the_service(
    pod: Path, manifests: dict[str, Any]
) -> None:
    service, job = manifests["Service"], manifests["Job"]["spec"]
    wait_for_output(start_pod(pod, manifests, "0"))
    words = (pod / "words").read_text()
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint={manifests['Job']['metadata']['name']}-0.{name}:{port}" in words
    assert job["template"]["spec"]["subdomain"] == name
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert f"--nnodes={job['completions']}" in words and job["completions"] == job["parallelism"]
    gpus = container(manifests)["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in words, "one rank for each GPU"


def test_a_pod_that_stopped_after_a_save_is_replaced_and_a_wrong_setting_ends_the_job(
    manifests: dict[str, Any],
) -> None:
    job = manifests["Job"]["spec"]
    rules = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert rules == {75: "Ignore", 76: "Ignore", 2: "FailJob"}
    assert {
        rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"][:2]
    } == {"train"}
    assert job["template"]["spec"]["restartPolicy"] == "Never", "what a pod failure policy asks for"


def test_ranks_have_less_time_to_save_than_the_pod_has_to_end(manifests: dict[str, Any]) -> None:
    script = container(manifests)["args"][0]
    (seconds,) = [
        word.partition("=")[2] for word in script.split() if word.startswith("--shutdown-timeout=")
    ]
    assert (
        int(seconds) < manifests["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
