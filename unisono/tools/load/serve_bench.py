"""``unisono bench serve``: load on an OpenAI-compatible server, measured by its clients.

It measures any server over HTTP, streamed, with the definitions of ``vllm bench serve`` (``figures``). Without
``--base-url`` it starts ``unisono serve`` with all flags that are not its own.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from unisono.config.preflight.model import check_model
from unisono.console.output import note
from unisono.console.values import writable
from unisono.tools.load import stall
from unisono.tools.load.client import LoadTarget
from unisono.tools.load.figures import chosen_metrics, chosen_percentiles, figures, limits_of
from unisono.tools.load.flags import body_of, command_line, environment, mix_of, pairs, scene_of
from unisono.tools.load.mixes import arrivals, conversations
from unisono.tools.load.plots import draw, pyplot
from unisono.tools.load.prompts import source_of
from unisono.tools.load.server_process import check_flags, served
from unisono.tools.load.wire import Exchange
from unisono.tools.load.workers import ScheduledLoad, run, run_load
from unisono.types import ConfigError, UnisonoError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "sglang": "/v1/completions",
    "sglang-oai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "sglang-oai-chat": "/v1/chat/completions",
    "vllm-chat": "/v1/chat/completions",
}
"""--backend -> endpoint."""


def serve(
    context: typer.Context,
    target: dict[str, Any],
    mix: dict[str, Any],
    rate: dict[str, Any],
    sampling: dict[str, Any],
    report: dict[str, Any],
    scene: dict[str, Any],
) -> None:
    """Measure latency, throughput and goodput of a server, or with --scenario stall its largest gap in a stream.

    Flags that are not listed here are those of `unisono serve`, for a server that this command starts. Exit code 1 if
    no request succeeded.
    """
    target["base_url"] = _url(target["base_url"], target.pop("host"), target.pop("port"))
    _check(target, rate, report)
    bench = _ServeBench(target, mix, rate, sampling, report, scene)
    if target["base_url"] is not None:
        if context.args:
            raise ConfigError(f"{context.args[0]}: no such flag; flags of the server belong to the server.")
        bench.measure(target["base_url"])
        return
    model = target["model"] or "tiny"
    check_model(model, load_format="dummy")  # the server checks its weights
    check_flags(model, context)
    with served(model, context.args) as url:
        bench.measure(url)


def _url(base_url: str | None, host: str | None, port: int | None) -> str | None:
    """The URL of a running server; None to start one. Raises ConfigError if it is set twice."""
    if host is None and port is None:
        return base_url
    if base_url is not None:
        raise ConfigError(f"--base-url {base_url} is set beside --host or --port; leave one of them out.")
    return f"http://{host or '127.0.0.1'}:{port or 8000}"


def _check(target: dict[str, Any], rate: dict[str, Any], report: dict[str, Any]) -> None:
    """Check the flags before anything runs. Raises ConfigError."""
    if target["backend"] not in ENDPOINTS:
        raise ConfigError(f"--backend {target['backend']!r} is unknown; choose from {', '.join(ENDPOINTS)}.")
    for flag, value in (("--request-rate", rate["request_rate"]), ("--burstiness", rate["burstiness"])):
        if not value > 0:
            raise ConfigError(f"{flag} {value:g}: give a number above 0.")
    writable("--out", report["out"])
    writable("--plot", report["plot"])
    if report["plot"] is not None:
        pyplot()


class _ServeBench:
    """The command's flags, checked."""

    def __init__(
        self,
        target: dict[str, Any],
        mix: dict[str, Any],
        rate: dict[str, Any],
        sampling: dict[str, Any],
        report: dict[str, Any],
        scene: dict[str, Any],
    ) -> None:
        self.target_flags, self.rate, self.report = target, rate, report
        self.mix, self.seed = mix_of(mix)
        self.body, self.scene = body_of(sampling), scene_of(scene)
        self.limits, self.metadata = limits_of(report["goodput"] or ()), pairs("--metadata", report["metadata"])
        self.metrics = chosen_metrics(report["percentile_metrics"])
        self.percentiles = chosen_percentiles(report["metric_percentiles"])
        self.headers = pairs("--header", target["header"])
        if target["api_key"]:
            self.headers = {"Authorization": f"Bearer {target['api_key']}"} | self.headers
        self.endpoint = target["endpoint"] or ENDPOINTS[target["backend"]]
        if target["token_ids"] and self.endpoint.endswith("chat/completions"):
            raise ConfigError("--token-ids: chat messages are text; use /v1/completions.")

    def measure(self, url: str) -> None:
        """Run the scenario against the server at ``url`` and report it."""
        url = url.rstrip("/").removesuffix("/v1")
        target = LoadTarget(
            url, self.endpoint, "", self.body, self.headers, self.target_flags["timeout"], self.target_flags["insecure"]
        )
        listed = self._models(target)
        name = (
            self.target_flags["served_model_name"] or self.target_flags["model"] or (listed[0]["id"] if listed else "")
        )
        if self.target_flags["base_url"] is None:
            name = listed[0]["id"]
        target = replace(target, model=name)
        root = next((one.get("root") for one in listed if one.get("id") == name), None)
        source = source_of(
            [self.target_flags["tokenizer"], self.target_flags["model"], root], self.target_flags["token_ids"]
        )
        if not source.exact:
            print("No tokenizer is at hand (--tokenizer): prompts are words, whose lengths are approximate.")
        if self.scene is not None:
            scene, body = self.scene, self.body | {"ignore_eos": True}
            target = replace(target, body=body)
            found = run(lambda: stall.over_http(target, source, scene, self.seed))
            print(stall.table(found))
            self._write(target, {"scene": vars(scene), "stalls": stall.as_json(found)})
            return
        self._load(target, source)

    def _load(self, target: LoadTarget, source: Any) -> None:
        requests = conversations(self.mix, source, self.seed)
        processes = self.rate["client_processes"]
        if count := self.rate["num_warmups"]:
            warm = conversations(replace(self.mix, num_prompts=count), source, self.seed + 1_000_003)
            run_load(ScheduledLoad(target, source, warm, [0.0] * len(warm), self.rate["max_concurrency"]), processes)
        times = arrivals(
            len(requests), self.rate["request_rate"], self.rate["burstiness"], random.Random(self.seed + 1)
        )
        note(f"{len(requests)} requests to {target.url}{target.endpoint} …")
        outcomes = run_load(ScheduledLoad(target, source, requests, times, self.rate["max_concurrency"]), processes)
        found = figures(outcomes, self.limits, self.metrics, self.percentiles)
        print(found.markdown())
        self._write(target, found.json(self.report["save_detailed"]))
        if self.report["plot"] is not None:
            rate = self.rate["request_rate"]
            title = f"{target.model}: {self.mix.dataset_name}, {found.completed} requests, {rate:g}/s"
            draw(found, title, self.report["plot"])
        if not found.completed:
            raise typer.Exit(1)

    def _write(self, target: LoadTarget, results: dict[str, Any]) -> None:
        """Write --out: settings, results, versions and the command."""
        path: Path | None = self.report["out"]
        if path is None:
            return
        data: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command_line()}
        data |= {"base_url": target.url, "endpoint": target.endpoint, "model_id": target.model}
        rate = {name: str(value) if value == float("inf") else value for name, value in self.rate.items()}
        mix = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self.mix).items()}
        data |= {"client": environment(), "settings": {**mix, "seed": self.seed, **rate, "body": target.body}}
        path.write_text(json.dumps(data | self.metadata | results, indent=1) + "\n")

    def _models(self, target: LoadTarget) -> list[dict[str, Any]]:
        """The server's model list; [] if it has no such route.

        Raises UnisonoError for a server that does not answer.
        """
        end = time.monotonic() + self.target_flags["ready_check_timeout_sec"]
        while True:
            found = run(lambda: _get(target, "/v1/models"))
            if found.failure is None or time.monotonic() > end:
                break
            time.sleep(0.5)
        if found.failure is not None:
            raise UnisonoError(f"{target.url} does not answer: {': '.join(found.failure)}.")
        if found.status in (401, 403):
            raise UnisonoError(f"{target.url} answers {found.status}: give --api-key.")
        try:
            return [one for one in json.loads(found.body)["data"] if isinstance(one, dict)]
        except (ValueError, KeyError, TypeError):
            return []


async def _get(target: LoadTarget, path: str) -> Exchange:
    wire = replace(target, timeout=min(target.timeout, 30.0)).wire()
    try:
        return await wire.exchange(wire.request("GET", path))
    finally:
        wire.close()
