"""packaging/: dashboards and alerts ask for metrics that there are; images, compose file and unit name what exists."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.http.conftest import Server, serving

ROOT = Path(__file__).parents[2]
HOME = ROOT / "packaging"
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
WORDS = {
    "sum", "min", "max", "rate", "increase", "min_over_time", "histogram_quantile", "by", "ignoring", "group_left",
    "up",
}  # fmt: skip
QUESTION = "Lena has 5 boxes with 12 pens each. She gives away 9 pens. How many pens are left?"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small server, else of its defaults, that has answered, and refused."""
    flags = ["--max-num-seqs", "2", "--max-model-len", "256", "--max-num-batched-tokens", "64"]
    with serving(tmp_path_factory.mktemp("serving"), *flags) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert server.http.post("/v1/chat/completions", json=body | {"model": "none"}).status_code == 404
        yield server


@pytest.fixture(scope="module")
def labels(busy: Server) -> dict[str, set[str]]:
    """Name of a metric -> the labels of its samples."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found | {"up": {"job", "instance"}}


def check_query(text: str, labels: dict[str, set[str]]) -> None:
    selectors = SELECTOR.findall(text)
    assert selectors, text
    for name, conditions in selectors:
        assert name in labels, f"{name} is no metric of the server: {text}"
        for condition in filter(None, (part.strip() for part in conditions.split(","))):
            assert re.fullmatch(r'(\w+)(=|!=|=~|!~)"[^"]*"', condition), text
            assert re.split("[=!]", condition)[0] in labels[name], f"{name} has no such label: {condition}"
        assert ("_bucket" in name) == ("le" in labels[name])
    grouped = {one.strip() for part in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", text) for one in part.split(",")}
    known = set().union(*(labels[name] for name, _ in selectors))
    assert grouped <= known, f"{grouped - known} are no labels: {text}"
    rest = re.sub(r"\[[^\]]*\]|\((?:\w+(?:, )?)+\)", "", SELECTOR.sub("", text))
    assert set(re.findall(r"[a-z_]+", rest)) <= WORDS, rest
    assert text.count("(") == text.count(")")


def dashboard() -> dict[str, Any]:
    return json.loads((HOME / "grafana" / "unisono.json").read_text())


def test_dashboard_panels_query_existing_metrics(labels: dict[str, set[str]]) -> None:
    panels = dashboard()["panels"]
    assert len(panels) >= 20
    for panel in panels:
        for target in panel["targets"]:
            check_query(target["expr"].replace("$__rate_interval", "1m"), labels)
    asked = {name for panel in panels for t in panel["targets"] for name, _ in SELECTOR.findall(t["expr"])}
    assert {"unisono:passes_total", "unisono:spec_decode_num_accepted_tokens_per_pos_total"} <= asked
    (variable,) = (v for v in dashboard()["templating"]["list"] if v["name"] == "model")
    name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
    assert label in labels[name]


def test_queries_of_unknown_metrics_are_rejected(labels: dict[str, set[str]]) -> None:
    for wrong in (
        'sum(unisono:nonsense{model_name=~"$model"})',
        'sum(unisono:engine_up{modell="x"})',
        "sum by (program) (unisono:engine_up{})",
        "summ(unisono:engine_up{})",
    ):
        with pytest.raises(AssertionError):
            check_query(wrong, labels)


def test_alerts_query_existing_metrics(labels: dict[str, set[str]]) -> None:
    rules = yaml.safe_load((HOME / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        expression, _, limit = re.fullmatch(r"(.*) (>|==) ([\d.]+)", rule["expr"]).groups()  # type: ignore[union-attr]
        check_query(expression, labels)
        assert float(limit) >= 0
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in set().union(*(labels[name] for name, _ in SELECTOR.findall(expression)))


def test_dashboard_equals_its_generator() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", HOME / "grafana" / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.dashboard() == dashboard()


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (HOME / "Dockerfile").read_text()))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def test_dockerfile_copies_existing_sources() -> None:
    ignored = (HOME / "Dockerfile.dockerignore").read_text().split()
    copied = [a.split()[:-1] for name, a in dockerfile() if name == "COPY" and "--from" not in a]
    for source in (one for line in copied for one in line):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} does not get into the build"
    stages = [a.split()[-1] for name, a in dockerfile() if name == "FROM"]
    assert stages == ["build", "base", "cpu", "cuda"]
    assert [a for name, a in dockerfile() if name == "USER"] == ["unisono", "unisono"]


def test_dockerfile_starts_an_existing_command() -> None:
    from unisono.cli.main import app

    (command,) = [json.loads(a) for name, a in dockerfile() if name == "CMD"]
    assert [json.loads(a) for name, a in dockerfile() if name == "ENTRYPOINT"] == [["unisono"]]
    shown = CliRunner().invoke(app, [command[0], "--help=all"], env={"COLUMNS": "300"}).output
    assert all(flag in shown for flag in command if flag.startswith("--"))


def health_check(port: str) -> int:
    (check,) = [a for name, a in dockerfile() if name == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    assert command.pop(0) == "python"
    return subprocess.run([sys.executable, *(part.replace("8000", port) for part in command)], timeout=30).returncode


def test_health_check_exit_codes(busy: Server) -> None:
    assert health_check(busy.url.rpartition(":")[2]) == 0
    assert health_check("1") != 0


def test_compose_file_references_exist() -> None:
    compose = yaml.safe_load((HOME / "compose.yaml").read_text())
    services = compose["services"]
    for name in ("cuda", "cpu"):
        service = services[f"unisono-{name}"]
        assert service["build"]["target"] == name
        assert (HOME / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        drain = service["command"][service["command"].index("--drain-timeout") + 1]
        assert int(service["stop_grace_period"].removesuffix("s")) > int(drain)
        assert {"cache:/cache", "models:/models"} <= set(service["volumes"])
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (HOME / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    scrape = yaml.safe_load((HOME / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host in services["unisono-cpu"]["networks"]["default"]["aliases"]
    assert port == "8000"
    source = yaml.safe_load((HOME / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_the_unit_is_hardened_and_stops_gracefully(served: Any) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(HOME / "unisono.service")
    service = unit["Service"]
    flags = yaml.safe_load((HOME / "unisono.yaml").read_text())
    assert int(service["TimeoutStopSec"]) > flags["drain-timeout"]
    assert service["KillSignal"] == "SIGTERM"
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "DynamicUser"):
        assert service[name] == "yes"
    status, output, config, settings = served("--config", str(HOME / "unisono.yaml"))
    assert status == 0, output
    assert (config.model, settings.port, settings.restart_engine) == ("tiny", 8000, True)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", str(HOME / "unisono.service")], capture_output=True, text=True, timeout=60
        )
        wrong = [
            line for line in done.stderr.splitlines() if "unisono.service" in line and "not executable" not in line
        ]
        assert wrong == []


def test_a_stop_lets_running_requests_end(busy: Server) -> None:
    """Last: it ends the server."""
    body = {"model": "tiny", "prompt": "Tom has", "max_tokens": 120, "ignore_eos": True, "stream": True}
    told: list[str] = []
    begun = threading.Event()

    def ask() -> None:
        with httpx.stream("POST", f"{busy.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                told.append(line)
                begun.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    busy.signal(signal.SIGTERM)
    assert busy.wait(60) == 0
    asking.join(10)
    assert "data: [DONE]" in told
