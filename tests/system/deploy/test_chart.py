"""The Helm chart, rendered by Go's templates with Sprig, as Helm does, and checked against Kubernetes's schemas."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema_rs
import pytest
import trustme
import yaml

from pawl.client import AsyncClient
from pawl.launcher.services import STAGES
from tests import certificates, packages
from tests.system.deploy.conftest import KEY
from tests.system.deploy.containers import ROOT, Containers

pytestmark = pytest.mark.long
CHART = ROOT / "deploy/helm"
Values: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[Values], list[dict[str, Any]]]
_MODEL: Values = {"services": {"agent-loop": {"environment": {"PAWL_MODEL": "a-model"}}}}
_EVERYTHING: Values = {
    "tls": {"enabled": False},
    "autoscaling": {"enabled": True},
    "ingress": {"enabled": True, "className": "nginx", "annotations": {"a.example/b": "c"}},
    "storage": {"className": "nfs"},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "services": {"mailbox": {"replicas": 1}, **_MODEL["services"]},
}


def merged(first: Values, second: Values) -> Values:
    """Return `first` with `second` on top, as `helm --values` does."""
    both = {key: merged(first[key], second[key]) for key in second if isinstance(first.get(key), dict) and second[key]}
    return first | second | both


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    engine = packages.wheel(tmp_path_factory.mktemp("engine"), "py-go-template==1.0.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(engine))
        go_template = importlib.import_module("go_template")
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def manifests(values: Values) -> list[dict[str, Any]]:
        context = {"Values": merged(defaults, values), "Release": {"Name": "pawl", "Namespace": "agents"}}
        texts = [go_template.render(path, context).decode() for path in sorted((CHART / "templates").iterdir())]
        assert not [text for text in texts if "render template failed" in text], texts
        return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]

    return manifests


def named(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == kind}


def test_manifests_match_the_schemas_of_the_oldest_and_newest_kubernetes(render: Render, tmp_path: Path) -> None:
    schemas = packages.wheel(tmp_path, "kubernetes-validate==1.37.0") / "kubernetes_validate/kubernetes-json-schema"
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    for version in (oldest.removeprefix(">=").removesuffix(".0-0"), "1.37"):
        folder = schemas / f"v{version}.0-local-strict"

        def read(address: str, folder: Path = folder) -> Any:
            return json.loads((folder / address.rpartition("/")[2]).read_text())

        for manifest in [*render(_MODEL), *render(_EVERYTHING)]:
            group, _, api = manifest["apiVersion"].rpartition("/")
            kind = "-".join(filter(None, (manifest["kind"].lower(), group.partition(".")[0], api)))
            validator = jsonschema_rs.validator_for(read(f"{kind}.json"), retriever=read)
            assert [(each.instance_path, each.message) for each in validator.iter_errors(manifest)] == [], kind


def test_every_service_has_probes_a_budget_and_only_variables_that_it_reads(render: Render) -> None:
    specs = {spec.name: spec for stage in STAGES for spec in stage}
    manifests = render(_EVERYTHING)
    deployments = named(manifests, "Deployment")
    assert set(deployments) == set(specs) == set(named(manifests, "PodDisruptionBudget"))
    for name, deployment in deployments.items():
        [container] = deployment["template"]["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert set(variables) <= (specs[name].reads or set()), name
        assert specs[name].command[-1] == container["args"][0]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert variables["PAWL_METRICS_LISTEN"] == f"0.0.0.0:{ports['metrics']}"
        assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("liveness", "readiness")} == {"metrics"}
        assert named(manifests, "Service")[name]["selector"] == deployment["selector"]["matchLabels"]
        assert named(manifests, "PodDisruptionBudget")[name]["selector"] == deployment["selector"]
    [scaler] = named(manifests, "HorizontalPodAutoscaler").values()
    assert scaler["metrics"][0]["external"]["metric"]["name"] == "pawl_job_store_claimable_runs"
    assert "replicas" not in deployments["agent-loop"]


def test_with_tls_each_service_has_its_certificate_and_calls_others_at_their_internal_ports(render: Render) -> None:
    manifests = render(_MODEL)
    services = named(manifests, "Service")
    for name, deployment in named(manifests, "Deployment").items():
        pod = deployment["template"]["spec"]
        variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert {"name": "tls", "secret": {"secretName": f"{name}-tls"}} in pod["volumes"]
        assert variables["PAWL_TLS_CA_FILE"] == "/etc/pawl/tls/ca.crt"
        for variable, address in variables.items():
            if variable.endswith("_ADDRESS"):
                called, port = address.split(":")
                ports = {each["name"]: each["port"] for each in services[called]["ports"]}
                assert int(port) == (ports["public"] if name == "gateway" else ports["internal"])


_PROBE = "import ssl, sys, urllib.request as r; r.urlopen(sys.argv[1], context=ssl._create_unverified_context())"


async def test_pods_start_with_tls_and_answer_a_client(
    render: Render, containers: Containers, authority: trustme.CA, tmp_path: Path
) -> None:
    """The Secrets hold exactly what values.yaml lists. The values are those of docker-compose.yml."""
    compose = dict(containers.parts)
    model = {name: compose["agent-loop"]["environment"][name] for name in ("PAWL_MODEL", "OPENAI_BASE_URL")}
    services = {"mailbox": {"replicas": 1}, "agent-loop": {"environment": model}}
    pods = named(render({"host": "localhost", "services": services}), "Deployment")
    listed = re.findall(r"^#   ([a-z-]+) +((?:PAWL_|OPENAI_).*)$", (CHART / "values.yaml").read_text(), re.MULTILINE)
    secrets = {name: set(re.findall(r"[A-Z_]{5,}", names)) for name, names in listed}
    assert set(secrets) == set(pods)
    for name, deployment in pods.items():
        [container] = deployment["template"]["spec"]["containers"]
        files = certificates.write(tmp_path, name, authority)
        for path, file in (("tls.crt", files.certificate), ("tls.key", files.key), ("ca.crt", files.authority)):
            containers.write(f"{name}-tls/{path}", file.read_text())
        secret = {key: value for key, value in compose[name]["environment"].items() if key in secrets[name]}
        probe = container["readinessProbe"]["httpGet"]
        port = next(each["containerPort"] for each in container["ports"] if each["name"] == probe["port"])
        url = f"{probe['scheme'].lower()}://127.0.0.1:{port}{probe['path']}"
        containers.parts[name] = {
            "command": container["args"],
            "environment": secret | {each["name"]: each["value"] for each in container["env"]},
            "volumes": [each for mount in container["volumeMounts"] for each in _mounts(mount, name)],
            "healthcheck": {"test": ["CMD", "python", "-c", _PROBE, url]},
        }
    for name in ("job-store", "tool-registry", "notifier", "agent-loop", "gateway", "mailbox"):
        await containers.start(name)
    ca = tmp_path / "agent-loop-authority.pem"
    async with AsyncClient([f"127.0.0.1:{containers.port(7601)}"], api_key=KEY, authority=ca) as pawl:
        run = await pawl.start("what is 17 * 23?")
        assert "391" in "".join([piece async for piece in pawl.text(run.run_id)])


def _mounts(mount: dict[str, Any], name: str) -> list[str]:
    """Return the files of a mounted volume as volumes of a compose file."""
    files = {
        "keys": {"api-keys.json": "deploy/api-keys.json", "service-keys.json": "deploy/service-keys.json"},
        "tls": {file: f"{name}-tls/{file}" for file in ("tls.crt", "tls.key", "ca.crt")},
        "files": {"passwords.json": "deploy/mailbox-passwords.json", "egress.json": "deploy/mailbox-egress.json"},
        "data": {},
        "tmp": {},
    }[mount["name"]]
    return [f"./{source}:{mount['mountPath']}/{file}:ro" for file, source in files.items()]
