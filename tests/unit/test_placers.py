"""What placers write and hand out: scripts that a shell reads, manifests that Kubernetes takes, keys that fit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tailrace.cli import main
from tailrace.launch.placers.fleet import FleetRequest, LaunchError, NodeShare, train_words
from tailrace.launch.placers.keys import make_keys
from tailrace.launch.placers.kuberay import HERE, ray_manifests
from tailrace.launch.placers.kubernetes import plain_manifests
from tailrace.launch.placers.manifest_text import documents
from tailrace.launch.placers.pods import PodShape
from tailrace.launch.placers.ray_agent import AgentOrder, environment
from tailrace.launch.placers.slurm import SlurmJob, batch_script
from tailrace.launch.secret import SecretError, read_secret
from tailrace.wire.keys import JoinKey, Keyring
from tailrace.wire.tls import Identity

ROOT = Path(__file__).parents[2]
HEAVY = str(ROOT / "examples" / "heavy_tail.toml")
RELEASE = "1.33"  # of Kubernetes


def fleet(*settings: str, nodes: int = 3, replicas: int | None = None) -> FleetRequest:
    return FleetRequest([HEAVY], list(settings), nodes, replicas)


# -------------------------------------------------------------------------------------------------------------- common


@pytest.mark.parametrize(
    ("replicas", "cards", "expected"),
    [(None, 8, (8, 8)), (None, 0, (1, 0)), (2, 8, (2, 2)), (4, 2, (4, 2)), (3, 0, (3, 0))],
)
def test_a_node_gets_a_replica_for_each_card_unless_a_number_is_given(replicas, cards, expected):
    asked = fleet(replicas=replicas)
    assert (asked.each.replicas_for(cards), asked.each.cards_for(cards)) == expected


def test_the_keys_that_a_placer_makes_are_those_of_the_run(monkeypatch):
    keys = make_keys()
    monkeypatch.setenv("TAILRACE_RUN_SECRET", keys.secret)
    secret = read_secret(None)
    fingerprint = Identity(Keyring(secret.controller, secret.token).identity).fingerprint
    assert JoinKey.read(keys.join) == JoinKey(fingerprint, secret.token)
    assert read_secret(None) != secret  # it was taken out of the environment
    assert keys.secret not in keys.join
    assert make_keys() != keys


@pytest.mark.parametrize(
    ("content", "words"), [("secret", "64 hex digits"), ("ab" * 31, "64 hex digits"), (None, "No such")]
)
def test_what_is_no_secret_is_refused(tmp_path, content, words):
    file = tmp_path / "run.secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SecretError, match=words):
        read_secret(file)


def test_no_key_is_on_a_command_line():
    keys = make_keys()
    words = [*train_words(fleet(), "10.0.0.1", 4700, []), *NodeShare(2).worker_words("10.0.0.1:4700", 2)]
    pods = [
        each["spec"]["template"] for each in plain_manifests(fleet(), PodShape("image"), keys) if each["kind"] == "Job"
    ]
    assert not any(secret in text for secret in keys for text in (*words, batch_script(fleet(), SlurmJob()), str(pods)))


def test_a_node_has_ranks_and_the_replicas_that_its_other_cards_are_good_for():
    assert NodeShare().replicas_for(8) == 8
    assert NodeShare().replicas_for(0) == 1
    shared = NodeShare(None, ranks=4, replica_cards=2)
    assert (shared.replicas_for(8), shared.cards_for(8)) == (2, 8)
    assert shared.worker_words("a:1", 8)[3:7] == ["--replicas", "2", "--ranks", "4"]
    only_ranks = NodeShare(0, ranks=8)
    assert (only_ranks.replicas_for(8), only_ranks.cards_for(8), only_ranks.cards_for(4)) == (0, 8, 4)
    assert "--ranks" not in NodeShare(2).worker_words("a:1", 8)


def test_where_nodes_have_the_ranks_the_controllers_machine_computes_nothing_unless_it_is_told_to():
    words = FleetRequest([HEAVY], ["--trainer.ranks", "4"], 2, 1, ranks=2).of_controller()
    assert words == ["--local.ranks", "0"]  # the file says how many replicas there are
    told = FleetRequest([HEAVY], ["--trainer.ranks", "4", "--local.ranks", "4"], 2, 1, ranks=2)
    assert told.of_controller() == []
    assert fleet().of_controller() == []


# ----------------------------------------------------------------------------------------------------------------- ray


@pytest.mark.parametrize(("cards", "seen"), [(2, "4,5"), (0, "")])
def test_an_agent_sees_the_cards_that_ray_gave_and_no_others(cards, seen):
    order = AgentOrder((), {"TAILRACE_JOIN_KEY": "key"}, cards, "/", None)
    found = environment({"CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "1", "HOME": "/root"}, order)
    assert found == {"CUDA_VISIBLE_DEVICES": seen, "HOME": "/root", "TAILRACE_JOIN_KEY": "key"}


def test_an_agent_has_the_threads_of_whoever_launched_it():
    order = AgentOrder((), {}, 0, "/", "8")
    assert environment({"OMP_NUM_THREADS": "1"}, order)["OMP_NUM_THREADS"] == "8"


# --------------------------------------------------------------------------------------------------------------- slurm


def test_the_script_asks_slurm_for_what_was_asked_for():
    job = SlurmJob(cards=4, time="8:00:00", partition="gpu", more=["--account=lab"])
    script = batch_script(fleet("--run.name", "a b"), job)
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=3", "--gpus-per-node=4", "--time=8:00:00", "--partition=gpu", "--account=lab"} <= set(asked)
    assert {"--requeue", "--no-kill", "--signal=B:USR1@120"} <= set(asked)
    assert "--replicas 4" in script
    assert "run='runs/a b'" in script


@pytest.mark.parametrize("settings", [(), ("--run.name", "a 'quoted' $name"), ("--local.listen", "10.0.0.1")])
def test_a_shell_reads_the_script(settings):
    script = batch_script(fleet(*settings), SlurmJob())
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (6, "--local.ranks 2 --local.replicas 2"),  # the same on every node
        (5, "--local.ranks 1 --local.replicas 3"),
        (4, "--local.ranks 0 --local.replicas 4"),  # the other nodes have all of them
    ],
)
def test_where_nodes_have_ranks_the_first_one_has_what_they_leave(ranks, settings):
    asked = FleetRequest([HEAVY], ["--trainer.ranks", str(ranks), "--local.replicas", "auto"], 3, ranks=2)
    script = batch_script(asked, SlurmJob(cards=4))
    assert f" {settings} --auto-resume &" in script
    assert "--replicas 2 --ranks 2" in script


def test_more_ranks_than_the_nodes_have_room_for_are_refused():
    with pytest.raises(LaunchError, match=r"trainer\.ranks is 7, and 3 nodes with 2 each have room for 6; write more"):
        batch_script(FleetRequest([HEAVY], ["--trainer.ranks", "7"], 3, ranks=2), SlurmJob(cards=4))


def test_a_script_is_written_to_a_file(tmp_path, capsys):
    assert main(["launch", "slurm", HEAVY, "--nodes", "2", "-o", str(tmp_path / "job.sh")]) == 0
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash\n#SBATCH")
    assert capsys.readouterr().out == ""
    assert main(["launch", "slurm", HEAVY, "-o", str(tmp_path / "no" / "job.sh")]) == 2


def test_without_sbatch_nothing_is_submitted(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "slurm", HEAVY, "--submit"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- kubernetes


def read_back(objects: list[dict]) -> list[dict]:
    """As kubectl would."""
    return list(yaml.safe_load_all(documents(objects)))


@pytest.mark.parametrize("cards", [0, 4])
def test_kubernetes_takes_the_manifests(cards):
    shape = PodShape("registry/image:1", cards, volumes=[("models", "/models")])
    objects = read_back(plain_manifests(fleet("--run.name", "My Run_1"), shape, make_keys()))
    for each in objects:
        kubernetes_validate.validate(each, RELEASE, strict=True)
    kinds = ["Secret", "Secret", "ConfigMap", "PersistentVolumeClaim", "Service", "Job", "Job"]
    assert [each["kind"] for each in objects] == kinds
    assert {each["metadata"]["name"].removeprefix("tailrace-my-run-1") for each in objects} == {
        "",
        "-controller",
        "-agents",
    }


def test_a_manifest_with_a_mistake_is_not_taken():
    job = read_back(plain_manifests(fleet(), PodShape("image"), make_keys()))[-1]
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, RELEASE, strict=True)


def test_kubernetes_takes_the_pods_of_a_ray_job():
    objects = read_back(ray_manifests(fleet(nodes=5), PodShape("image", 2)))
    job = objects[-1]["spec"]
    groups = [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, RELEASE, strict=True)
    assert groups[1]["replicas"] == 5
    assert json.loads(json.loads(groups[0]["rayStartParams"]["resources"])) == json.loads(job["entrypointResources"])
    assert HERE in job["entrypointResources"]


def test_the_settings_in_a_manifest_are_those_of_the_run(tmp_path):
    objects = read_back(plain_manifests(fleet("--schedule.kind", "sync"), PodShape("image"), make_keys()))
    file = tmp_path / "run.toml"
    file.write_text(next(each for each in objects if each["kind"] == "ConfigMap")["data"]["run.toml"])
    assert FleetRequest([str(file)], []).config == fleet("--schedule.kind", "sync").config


def test_only_the_controller_has_the_secret():
    keys = make_keys()
    objects = plain_manifests(fleet(), PodShape("image"), keys)
    holders = {each["metadata"]["name"] for each in objects if keys.secret in str(each)}
    assert holders == {"tailrace-heavy-tail-controller"}
    agents = objects[-1]["spec"]["template"]["spec"]
    assert [each["secret"]["secretName"] for each in agents["volumes"] if "secret" in each] == [
        "tailrace-heavy-tail-agents"
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("k8s", HEAVY), "required: --image"),
        (("k8s", HEAVY, "--image", "x", "--volume", "models"), "write --volume models:/models"),
        (("k8s", HEAVY, "--image", "x", "--run.name", "1"), "no name for Kubernetes"),
        (("k8s", "nowhere.toml", "--image", "x"), "does not exist"),
        (("slurm", HEAVY, "--gpus-per-node", "-1"), "not a number of cards"),
        (("slurm", "nowhere.toml"), "does not exist"),
    ],
)
def test_bad_input_is_one_sentence(options, sentence, capsys):
    assert main(["launch", *options]) == 2
    said = capsys.readouterr().err
    assert (sentence in said, len(said.strip().splitlines())) == (True, 1), said


def test_text_of_several_lines_stays_as_it_is():
    value = {
        "a": 'one\n  two: "x"\n\nthree\n',
        "b": ["- c", "# d", "true", "0x1"],
        "c.d/e": {"f": [], "g": {}},
        "h": [[1], {"i": 2, "j": None}],
    }
    assert yaml.safe_load(documents([value])) == value


def test_a_name_that_is_too_long_is_cut():
    assert plain_manifests(fleet("--run.name", "x" * 100), PodShape("image"), make_keys())[0]["metadata"]["name"] == (
        f"tailrace-{'x' * 40}-controller"
    )
    with pytest.raises(LaunchError):
        plain_manifests(fleet("--run.name", "___"), PodShape("image"), make_keys())
