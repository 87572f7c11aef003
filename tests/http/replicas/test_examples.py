"""The examples of packaging/ray are what Ray and the application take."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.http.conftest import ROOT

EXAMPLES = ROOT / "packaging/ray"


def applications() -> list[Any]:
    """The configuration of Ray Serve in each example."""
    service = yaml.safe_load((EXAMPLES / "rayservice.yaml").read_text())
    return [yaml.safe_load((EXAMPLES / "serve.yaml").read_text()), yaml.safe_load(service["spec"]["serveConfigV2"])]


@pytest.mark.parametrize("config", applications(), ids=["serve", "rayservice"])
def test_applications(config: Any) -> None:
    from unisono.config import EngineConfig

    [application] = config["applications"]
    [deployment] = application["deployments"]
    assert deployment["num_replicas"] == 1, "one router sees all requests"
    EngineConfig(**application["args"]["engine"])
    pytest.importorskip("ray.serve")
    from ray.serve.schema import ServeDeploySchema

    from unisono.entrypoints.ray_serve import Arguments, Unisono

    ServeDeploySchema(**config)
    assert application["import_path"] == "unisono.entrypoints.ray_serve:build"
    assert deployment["name"] == Unisono.name
    Arguments(**application["args"])


def test_the_cluster_has_the_gpus() -> None:
    service = yaml.safe_load((EXAMPLES / "rayservice.yaml").read_text())
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    [application] = applications()[1]["applications"]
    assert gpus * group["replicas"] >= application["args"]["data_parallel_size"]
