"""The manifests for Kubernetes: what kustomize makes of them, against the schemas, and against what a worker needs.

`kubectl` is not asked for: the two features of kustomize that are used, patches and images, are done here by hand.
"""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda import v1alpha1 as keda

from worker import process
from worker.cli import cli
from worker.keys import Keys
from worker.settings import DEFAULT_METRICS_PORT

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "ops/kubernetes"
NAMESPACE = "slotmill"
OPTIONS = {option.envvar for option in cli.commands["start"].params}
FLAGS = {flag for option in cli.commands["start"].params for flag in option.opts}

Object = dict[str, Any]


def kustomized(directory: Path) -> list[Object]:
    """The objects that `kubectl kustomize` prints."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    objects: list[Object] = []
    for name in kustomization["resources"]:
        path = directory / name
        objects += kustomized(path.resolve()) if path.is_dir() else [*yaml.safe_load_all(path.read_text())]
    for patch in kustomization.get("patches", []):
        change = yaml.safe_load((directory / patch["path"]).read_text())
        objects = [merged(each, change) if is_same(each, change) else each for each in objects]
    for image in kustomization.get("images", []):
        for container in containers(objects):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def is_same(one: Object, other: Object) -> bool:
    return (one["kind"], one["metadata"]["name"]) == (other["kind"], other["metadata"]["name"])


def merged(old: Any, new: Any) -> Any:
    """A strategic merge: maps by key, lists of named things by name, else the new one."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old[key], value) if key in old else value for key, value in new.items()}
    if isinstance(old, list) and all(isinstance(item, dict) and "name" in item for item in [*old, *new]):
        by_name = {item["name"]: item for item in new}
        kept = [merged(item, by_name.pop(item["name"], item)) for item in old]
        return [*kept, *by_name.values()]
    return deepcopy(new)


def containers(objects: list[Object]) -> list[Object]:
    return [
        container
        for each in objects
        for container in each.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    ]


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


VARIANTS = {name: kustomized(DIRECTORY / name) for name in ("cpu", "gpu")}
SCALING = kustomized(DIRECTORY / "keda")
SCALED = only(SCALING, "ScaledObject")["spec"]
TRIGGERS = {trigger["name"]: trigger for trigger in SCALED["triggers"]}

each_variant = pytest.mark.parametrize("objects", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture
def deployment(objects: list[Object]) -> Object:
    return only(objects, "Deployment")


@pytest.fixture
def pod(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def worker(pod: Object) -> Object:
    (container,) = pod["containers"]
    assert isinstance(container, dict)
    return container


@pytest.fixture
def given(objects: list[Object], worker: Object) -> dict[str, str]:
    """The worker's variables of which the value stands in a manifest."""
    (source,) = worker["envFrom"]
    values = dict(only(objects, "ConfigMap", source["configMapRef"]["name"])["data"])
    return values | {each["name"]: each["value"] for each in worker["env"] if "value" in each}


# ---- schemas


@each_variant
def test_every_object_follows_the_schema_of_its_kind(objects: list[Object]) -> None:
    for each in objects:
        kubernetes_validate.validate(each, "1.30", strict=True)


def test_the_scaler_s_objects_have_no_field_that_keda_does_not_know() -> None:
    for each in SCALING:
        read = getattr(keda, each["kind"]).model_validate(each)
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == each


def test_every_file_belongs_to_a_kustomization() -> None:
    named: set[Path] = set()
    for path in DIRECTORY.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        assert kustomization["namespace"] == NAMESPACE
        named |= {path, *(path.parent / name for name in kustomization["resources"])}
        named |= {path.parent / patch["path"] for patch in kustomization.get("patches", [])}
    assert {path for path in DIRECTORY.rglob("*") if path.is_file()} <= named


# ---- the worker


@each_variant
def test_probes_ask_the_right_endpoints_at_a_port_that_exists(worker: Object, given: dict[str, str]) -> None:
    (port,) = worker["ports"]
    asked = {kind: worker[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert asked == {
        "startup": {"path": "/readyz", "port": port["name"]},
        "liveness": {"path": "/livez", "port": port["name"]},
        "readiness": {"path": "/readyz", "port": port["name"]},
    }
    assert str(port["containerPort"]) == given["SLOTMILL_METRICS_PORT"]
    assert given["SLOTMILL_METRICS_HOST"] == "0.0.0.0"


@each_variant
def test_a_model_has_half_an_hour_to_load(worker: Object) -> None:
    probe = worker["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


@each_variant
def test_what_the_worker_is_told_are_options(worker: Object, given: dict[str, str]) -> None:
    assert {name for name in given if name.startswith("SLOTMILL_")} <= OPTIONS
    command, *arguments = worker["args"]
    assert command == "start"
    assert {word for word in arguments if word.startswith("--")} <= FLAGS


@each_variant
def test_the_worker_has_time_to_drain_before_it_is_killed(pod: Object, given: dict[str, str]) -> None:
    needed_s = float(given["SLOTMILL_DRAIN_S"]) + process.RELEASE_S + process.LEAVE_S
    assert pod["terminationGracePeriodSeconds"] > needed_s


@each_variant
def test_a_disruption_budget_and_the_deployment_mean_the_same_pods(objects: list[Object], deployment: Object) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels


@each_variant
def test_prometheus_finds_the_worker_by_label_port_name_and_annotation(deployment: Object, worker: Object) -> None:
    metadata = deployment["spec"]["template"]["metadata"]
    assert metadata["labels"] == {"app.kubernetes.io/name": "slotmill"}
    assert worker["ports"] == [{"name": "metrics", "containerPort": DEFAULT_METRICS_PORT}]
    assert metadata["annotations"]["prometheus.io/port"] == str(DEFAULT_METRICS_PORT)


@each_variant
def test_no_container_is_root_or_writes_outside_its_volumes(objects: list[Object]) -> None:
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            pod = each["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["automountServiceAccountToken"] is False
            for container in pod["containers"]:
                context = container["securityContext"]
                assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
                assert context["capabilities"] == {"drop": ["ALL"]}


@each_variant
def test_the_user_and_the_cache_are_those_of_the_image(pod: Object, worker: Object) -> None:
    dockerfile = (ROOT / "ops/docker/Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in dockerfile
    mounted = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    assert mounted["cache"] in dockerfile
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}


def test_only_the_gpu_s_worker_asks_for_one() -> None:
    limits = {name: containers([only(objects, "Deployment")])[0]["resources"]["limits"] for name, objects in VARIANTS.items()}
    assert limits["gpu"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in limits["cpu"]


# ---- the server


@each_variant
def test_the_server_s_configuration_is_the_one_of_ops(objects: list[Object]) -> None:
    assert only(objects, "ConfigMap", "slotmill-redis")["data"]["redis.conf"] == (ROOT / "ops/redis/redis.conf").read_text()


@each_variant
def test_the_url_leads_to_the_server(objects: list[Object], given: dict[str, str]) -> None:
    service, server = only(objects, "Service"), only(objects, "StatefulSet")["spec"]
    (port,) = service["spec"]["ports"]
    assert given["SLOTMILL_REDIS_URL"] == f"redis://:$(REDIS_PASSWORD)@{service['metadata']['name']}:{port['port']}/0"
    assert service["spec"]["selector"] == server["selector"]["matchLabels"] == server["template"]["metadata"]["labels"]
    (container,) = server["template"]["spec"]["containers"]
    assert port["targetPort"] in [each["name"] for each in container["ports"]]
    assert server["serviceName"] == service["metadata"]["name"]


@each_variant
def test_the_server_s_data_are_on_a_volume_and_its_image_is_that_of_the_compose_file(objects: list[Object]) -> None:
    server = only(objects, "StatefulSet")["spec"]
    (container,) = server["template"]["spec"]["containers"]
    (claim,) = server["volumeClaimTemplates"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in container["volumeMounts"]
    assert container["image"] == yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]["image"]


@each_variant
def test_the_server_is_full_before_it_is_killed(objects: list[Object]) -> None:
    (container,) = only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    limit = container["resources"]["limits"]["memory"]
    most = container["args"][container["args"].index("--maxmemory") + 1]
    assert 2 * int(most.removesuffix("mb")) / 1024 > int(limit.removesuffix("Gi")) > 1.5 * int(most.removesuffix("mb")) / 1024


@each_variant
def test_a_pod_that_does_no_work_keeps_no_node_from_being_drained(objects: list[Object]) -> None:
    assert only(objects, "PodDisruptionBudget")["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@each_variant
def test_no_password_is_in_a_manifest(objects: list[Object]) -> None:
    assert not [each for each in [*objects, *SCALING] if each["kind"] == "Secret"]
    references = re.findall(r"'secretKeyRef': (\{.*?\})", str(objects))
    assert set(references) == {"{'name': 'slotmill-redis', 'key': 'password'}"}
    assert only(SCALING, "TriggerAuthentication")["spec"] == {
        "secretTargetRef": [{"parameter": "password", "name": "slotmill-redis", "key": "password"}]
    }


# ---- scaling


def test_there_are_triggers_for_the_length_of_every_lane_and_for_its_delayed_jobs() -> None:
    keys = Keys("default")
    streams = [trigger["metadata"]["stream"] for trigger in TRIGGERS.values() if trigger["type"] == "redis-streams"]
    assert streams == list(keys.lanes)
    sets = [trigger["metadata"]["listName"] for trigger in TRIGGERS.values() if trigger["type"] == "redis"]
    assert sets == list(keys.delayed_lanes)
    known = {"redis-streams": {"address", "stream", "streamLength"}, "redis": {"address", "listName", "listLength"}}
    assert all(set(trigger["metadata"]) == known[trigger["type"]] for trigger in TRIGGERS.values())


def test_the_queue_that_is_measured_is_the_one_that_is_served() -> None:
    assert only(VARIANTS["gpu"], "ConfigMap", "slotmill-worker")["data"]["SLOTMILL_QUEUE"] == "default"


def test_urgent_lanes_ask_for_workers_sooner() -> None:
    high, normal, low = (int(TRIGGERS[lane]["metadata"]["streamLength"]) for lane in ("high", "normal", "low"))
    assert high < normal < low


def test_keda_reaches_the_server_from_its_own_namespace() -> None:
    service = only(VARIANTS["gpu"], "Service")
    host = f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local:{service['spec']['ports'][0]['port']}"
    assert {trigger["metadata"]["address"] for trigger in TRIGGERS.values()} == {host}
    assert {trigger["authenticationRef"]["name"] for trigger in TRIGGERS.values()} == {"slotmill-redis"}


@each_variant
def test_nothing_but_the_scaler_sets_how_many_workers_there_are(deployment: Object) -> None:
    assert "replicas" not in deployment["spec"]
    assert SCALED["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


@each_variant
def test_no_worker_is_left_when_there_is_no_work_and_the_last_one_is_not_taken_in_a_pause(pod: Object) -> None:
    assert SCALED["minReplicaCount"] == 0
    assert SCALED["cooldownPeriod"] > pod["terminationGracePeriodSeconds"]
