"""The chart renders to manifests that Kubernetes and KubeRay accept, with pods that have only the rights they need."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError, lint

from tests.unit.deploy.chart import CHART, RESTRICTED, Manifest, defaults, one, pod_templates, render
from volley.job import JOB, RLJob

KUBERNETES = "1.33"
ROLES = {"actors": "volley_actor", "learner": "volley_learner", "rewards": "volley_reward"}
JOBS = sorted(Path("deploy/jobs").glob("*.yaml"))
JOB_OF_8 = yaml.safe_load(Path("deploy/jobs/gpu-8.yaml").read_text())

# Fields of KubeRay's RayCluster and RayJob that the chart writes (ray.io/v1, KubeRay 1.5.1).
RAY_FIELDS = {
    "RayCluster": {
        "": {"rayVersion", "authOptions", "gcsFaultToleranceOptions", "enableInTreeAutoscaling", "autoscalerOptions"}
        | {"headGroupSpec", "workerGroupSpecs"},
        "gcsFaultToleranceOptions": {"redisAddress", "redisPassword", "externalStorageNamespace"},
        "autoscalerOptions": {"version", "idleTimeoutSeconds", "upscalingMode", "securityContext", "resources"},
        "headGroupSpec": {"serviceType", "rayStartParams", "template"},
        "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    },
    "RayJob": {
        "": {"entrypoint", "clusterSelector", "submissionMode", "backoffLimit", "submitterPodTemplate"},
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "job": JOB_OF_8,
        "api": {"ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls"}},
        "image": {"pullSecrets": ["registry"], "device": "cpu"},
        "storage": {"storageClass": "shared"},
        "actors": {"gpus": 0, "nodeSelector": {"pool": "actors"}},
        "gpu": {"environment": {"NCCL_IB_HCA": "mlx5"}, "devices": {"rdma/hca": "1"}},
    },
    "least": {
        "api": {"replicas": 1, "existingTokenSecret": "token"},
        "redis": {"external": "redis.example.com:6380", "existingSecret": "redis"},
        "storage": {"existingClaim": "runs"},
        "priorityClasses": {"create": False},
        "networkPolicy": {"enabled": False},
        "rewardWorkers": {"sandbox": False},
    },
}


@pytest.fixture(params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(**VARIANTS[request.param])


def test_helm_lint_finds_nothing() -> None:
    report = lint(CHART, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


def test_manifests_follow_the_schemas_of_kubernetes(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] not in RAY_FIELDS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for component, template in pod_templates(manifests).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": component}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_ray_manifests_use_only_fields_that_kuberay_knows(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for part, known in RAY_FIELDS.get(manifest["kind"], {}).items():
            found = manifest["spec"][part] if part else manifest["spec"]
            for each in found if isinstance(found, list) else [found]:
                assert set(each) <= known


def test_names_that_manifests_refer_to_exist() -> None:
    manifests = render(**VARIANTS["everything"])
    made = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    for template in pod_templates(manifests).values():
        spec = template["spec"]
        if "priorityClassName" in spec:
            assert ("PriorityClass", spec["priorityClassName"]) in made
        for volume in spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in made
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
        names = {volume["name"] for volume in spec.get("volumes", [])} | {"data"}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= names
            for variable in container.get("env", []):
                secret = variable.get("valueFrom", {}).get("secretKeyRef")
                if secret and secret["key"] != "auth_token":  # KubeRay creates that one
                    assert ("Secret", secret["name"]) in made


def test_each_role_has_a_group_with_its_resource_and_bounds() -> None:
    values = {"actors": {"min": 1, "max": 6, "perPod": 2}, "rewardWorkers": {"tolerations": [{"operator": "Exists"}]}}
    groups = {
        each["groupName"]: each for each in one(render(**values), "RayCluster", "run")["spec"]["workerGroupSpecs"]
    }
    assert set(groups) == set(ROLES)
    for name, resource in ROLES.items():
        quoted = groups[name]["rayStartParams"]["resources"]  # KubeRay puts it on a command line unchanged
        (offered,) = json.loads(quoted.strip("'"))
        assert quoted == f"'{quoted.strip(chr(39))}'"
        assert offered == resource
    assert (groups["actors"]["minReplicas"], groups["actors"]["maxReplicas"]) == (1, 6)
    assert groups["actors"]["rayStartParams"]["resources"] == "'{\"volley_actor\":2}'"
    assert groups["rewards"]["template"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "num-gpus" not in groups["rewards"]["rayStartParams"]


def test_images_are_targets_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM .* AS ([\w-]+)$", Path("deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    for variant in ("defaults", "everything"):
        for component, template in pod_templates(render(**VARIANTS[variant])).items():
            image = template["spec"]["containers"][0]["image"]
            if component != "redis":
                assert image.removeprefix("volley:0.1.0-") in targets


def test_the_ray_version_is_the_locked_one() -> None:
    assert f"ray=={defaults()['rayVersion']}" in Path("deploy/locks/head.txt").read_text().splitlines()


# ---- who may do what ------------------------------------------------------------------------------------------------


def test_every_pod_meets_the_restricted_standard_except_for_what_the_sandbox_needs() -> None:
    for component, template in pod_templates(render(**VARIANTS["everything"])).items():
        spec, allowed = template["spec"], {}
        if component == "reward":
            assert spec.pop("hostUsers") is False
            allowed = {
                "procMount": "Unmasked",
                "seccompProfile": {"type": "Localhost", "localhostProfile": "volley-sandbox.json"},
                "appArmorProfile": {"type": "Unconfined"},
            }
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] >= 10_000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {next(iter(set(volume) - {"name"})) for volume in spec.get("volumes", [])}
        assert kinds <= {"emptyDir", "configMap", "persistentVolumeClaim", "secret"}
        for container in spec["containers"]:
            context = dict(container["securityContext"])
            context.pop("readOnlyRootFilesystem", None)
            assert context == RESTRICTED | allowed
            assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def test_without_the_sandbox_reward_pods_are_like_all_others() -> None:
    spec = pod_templates(render(rewardWorkers={"sandbox": False}))["reward"]["spec"]
    assert "hostUsers" not in spec
    assert spec["containers"][0]["securityContext"] == RESTRICTED


def test_reward_pods_have_no_kubernetes_token_no_secret_and_no_run_files() -> None:
    spec = pod_templates(render())["reward"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert all("valueFrom" not in variable for variable in spec["containers"][0]["env"])
    assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} == {"emptyDir"}


def peers(rule: Manifest, side: str) -> set[str]:
    return {
        each["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for each in rule[side]
        if "podSelector" in each
    }


def by_component(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The network policy of each kind of pod, without the policy that denies everything."""
    return {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"]
        for each in manifests
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] != "run-deny"
    }


def test_reward_pods_connect_only_with_the_run() -> None:
    manifests = render()
    policy = one(manifests, "NetworkPolicy", "run-reward")["spec"]
    (egress,), (ingress,) = policy["egress"], policy["ingress"]
    assert peers(egress, "to") == peers(ingress, "from") == {"head", "actor"}
    assert set(egress) == {"to"}
    assert all(set(peer) == {"podSelector"} for peer in egress["to"] + ingress["from"])  # no addresses, no namespaces
    deny = one(manifests, "NetworkPolicy", "run-deny")["spec"]
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in deny
    (names,) = deny["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    reaching = {
        name
        for name, other in by_component(manifests).items()
        for rule in other.get("egress", [])
        if "to" in rule and "reward" in peers(rule, "to")
    }
    assert reaching == {"head", "actor"}


def test_egress_and_ingress_policies_agree() -> None:
    policies = by_component(render(job=JOB_OF_8))
    for component, policy in policies.items():
        for rule in policy.get("egress", []):
            for other in peers(rule, "to") if "to" in rule else ():
                admitted = {peer for taken in policies[other]["ingress"] for peer in peers(taken, "from")}
                assert component in admitted, f"{component} may connect to {other}, which does not accept it"


def test_secrets_are_generated_or_referenced_and_never_in_plain_text() -> None:
    first, second = (one(render(), "Secret", "run-redis")["data"]["password"] for _ in range(2))
    assert len(first) >= 40
    assert first != second
    assert [each for each in render(**VARIANTS["least"]) if each["kind"] == "Secret"] == []
    plain = json.dumps(pod_templates(render(**VARIANTS["least"])))
    assert "redis://:${REDIS_PASSWORD}@redis.example.com:6380/1" in plain


def test_no_command_line_holds_the_password_of_redis() -> None:
    for manifests in (render(), render(job=JOB_OF_8), render(**VARIANTS["least"])):
        plain = json.dumps(manifests)
        assert "--requirepass" not in plain
        assert "--redis" not in plain


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"actor": {}},
        {"actors": {"max": -1}},
        {"actors": {"resources": {"cpu": "many", "memory": "1Gi"}}},
        {"image": {"device": "tpu"}},
        {"podSecurity": {"user": 0}},
        {"redis": {"external": "redis://host:6379"}},
        {"rewardWorkers": {"seccomp": "RuntimeDefault"}},
        {"job": "gpu-8.yaml"},
    ],
)
def test_wrong_values_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(HelmError):
        render(**values)


def test_every_value_is_in_the_schema_and_has_a_comment() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = defaults()
    assert set(schema["properties"]) == set(values)
    for name, section in schema["properties"].items():
        if section.get("type") == "object":
            assert set(section["properties"]) == set(values[name]), name


def test_the_job_of_a_release_equals_the_job_file() -> None:
    text = one(render(job=JOB_OF_8), "ConfigMap", "run-job")["data"]["job.yaml"]
    job = JOB.validate_python(yaml.safe_load(text))
    assert isinstance(job, RLJob)
    assert job == JOB.validate_python(JOB_OF_8)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_files_fit_the_groups_of_the_chart(path: Path) -> None:
    job = JOB.validate_python(yaml.safe_load(path.read_text()))
    assert isinstance(job, RLJob)
    assert set(job.actors.resources) == {ROLES["actors"]}
    assert set(job.reward_workers.resources) == {ROLES["rewards"]}
    assert set(job.learner.resources_per_rank) == {ROLES["learner"]}


def test_only_pods_with_gpus_get_nccls_environment_and_the_network_cards() -> None:
    settings = {"environment": {"NCCL_SOCKET_IFNAME": "eth0"}, "devices": {"rdma/hca": "2"}, "lockMemory": True}
    pods = pod_templates(render(gpu=settings, actors={"gpus": 0}))
    for role, template in pods.items():
        for container in template["spec"]["containers"]:
            names = {each["name"]: each.get("value") for each in container.get("env", [])}
            has_gpus = role == "learner"
            assert (names.get("NCCL_SOCKET_IFNAME") == "eth0") == has_gpus, role
            assert (container["resources"]["limits"].get("rdma/hca") == "2") == has_gpus, role
            assert (container["securityContext"]["capabilities"].get("add") == ["IPC_LOCK"]) == has_gpus, role


def test_without_such_settings_no_pod_may_lock_memory() -> None:
    for role, template in pod_templates(render()).items():
        for container in template["spec"]["containers"]:
            assert "add" not in container["securityContext"]["capabilities"], role
    learner = pod_templates(render())["learner"]["spec"]["containers"][0]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in learner["env"]


@pytest.mark.parametrize(
    ("gpu", "named"),
    [
        ({"environment": {"nccl-debug": "x"}}, "nccl-debug"),
        ({"devices": {"rdma": "1"}}, "rdma"),
        ({"lock": True}, "lock"),
    ],
)
def test_wrong_gpu_settings_are_refused(gpu: Manifest, named: str) -> None:
    with pytest.raises(HelmError, match=named):
        render(gpu=gpu)
