"""The Helm chart, rendered by Helm's own library."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path("deploy/kuberay")
Manifest = dict[str, Any]
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def defaults() -> Manifest:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


@functools.cache
def _chart() -> Chart:
    return Chart.load(CHART)


def render(**values: Any) -> list[Manifest]:
    """All manifests of a release called ``run`` in namespace ``rl``."""
    files = _chart().render(values, name="run", namespace="rl")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every pod template of the chart, by its component label."""
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in _templates(manifests)}


def _templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "RayCluster":
            yield from (group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]))
        elif manifest["kind"] == "RayJob":
            yield spec["submitterPodTemplate"]
        elif "template" in spec:
            yield spec["template"]
