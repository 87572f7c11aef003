"""Writes unisono.json, the Grafana dashboard beside this file: ``python packaging/grafana/make_dashboard.py``.

Queries name metrics without the prefix; ``$model`` is the dashboard's variable of the label model_name.
tests/http/test_packaging.py compares every query with a server's /metrics.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("unisono.json")
MODEL = 'model_name=~"$model"'
OWN = re.compile(r"@(\w+)(?:\{([^}]*)\})?")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "$__rate_interval"


def query(text: str) -> str:
    """``@name{labels}`` is a metric of Unisono of the chosen models."""
    return OWN.sub(lambda m: f"unisono:{m[1]}{{{MODEL}{', ' + m[2] if m[2] else ''}}}", text)


def quantiles(name: str) -> dict[str, str]:
    return {
        f"p{int(q * 100)}": f"histogram_quantile({q}, sum by (le) (rate(@{name}_bucket[{WINDOW}])))"
        for q in (0.5, 0.9, 0.99)
    }


def mean(name: str) -> str:
    return f"sum(rate(@{name}_sum[{WINDOW}])) / sum(rate(@{name}_count[{WINDOW}]))"


STATS: list[tuple[str, str, str]] = [
    ("Engine up", "min(@engine_up)", "bool_yes_no"),
    ("Running", "sum(@num_requests_running)", "short"),
    ("Waiting", "sum(@num_requests_waiting)", "short"),
    ("KV cache used", "max(@kv_cache_usage_perc)", "percentunit"),
    (
        "Tokens a round",
        f"1 + sum(rate(@spec_decode_num_accepted_tokens_total[{WINDOW}])) / "
        f"sum(rate(@spec_decode_num_drafts_total[{WINDOW}]))",
        "short",
    ),
    (
        "Passes that replay a graph",
        f'sum(rate(@passes_total{{kind!="eager"}}[{WINDOW}])) / sum(rate(@passes_total[{WINDOW}]))',
        "percentunit",
    ),
]
GRAPHS: list[tuple[str, str, dict[str, str]]] = [
    (
        "Throughput, tokens a second", "short",
        {
            "prompts": f"sum(rate(@prompt_tokens_total[{WINDOW}]))",
            "generated": f"sum(rate(@generation_tokens_total[{WINDOW}]))",
        },
    ),
    ("Time to the first token", "s", quantiles("time_to_first_token_seconds")),
    ("Between tokens", "s", quantiles("inter_token_latency_seconds")),
    ("Whole requests", "s", quantiles("e2e_request_latency_seconds")),
    (
        "Where a request's time goes (mean)", "s",
        {
            "queue": mean("request_queue_time_seconds"),
            "prefill": mean("request_prefill_time_seconds"),
            "decode": mean("request_decode_time_seconds"),
        },
    ),
    ("Requests", "short", {"running": "sum(@num_requests_running)", "waiting": "sum(@num_requests_waiting)"}),
    (
        "Accepted drafts by position", "percentunit",
        {
            "{{position}}": f"sum by (position) (rate(@spec_decode_num_accepted_tokens_per_pos_total[{WINDOW}])) / "
            f"ignoring (position) group_left sum(rate(@spec_decode_num_drafts_total[{WINDOW}]))"
        },
    ),
    (
        "Rounds by number of drafts", "ops",
        {
            "k = {{num_speculative_tokens}}": "sum by (num_speculative_tokens) "
            f"(rate(@spec_decode_num_rounds_total[{WINDOW}]))"
        },
    ),
    (
        "Passes", "ops",
        {"{{program}} {{kind}}": f"sum by (program, kind) (rate(@passes_total[{WINDOW}]))"},
    ),
    (
        "Eager passes, and why", "ops",
        {"{{program}}: {{reason}}": f'sum by (program, reason) (rate(@passes_total{{kind="eager"}}[{WINDOW}]))'},
    ),
    (
        "Rows of graphs that are padding", "percentunit",
        {"{{program}}": "max by (program) (@graph_padding_share)"},
    ),
    (
        "KV cache and prefix cache", "percentunit",
        {
            "KV cache used": "max(@kv_cache_usage_perc)",
            "prompt tokens from the cache": f"sum(rate(@prefix_cache_hits_total[{WINDOW}])) / "
            f"sum(rate(@prefix_cache_queries_total[{WINDOW}]))",
        },
    ),
    ("Preemptions", "ops", {"preempted": f"sum(rate(@num_preemptions_total[{WINDOW}]))"}),
    ("Prompt tokens", "short", quantiles("request_prompt_tokens")),
    ("Generated tokens", "short", quantiles("request_generation_tokens")),
    (
        "Ended requests by reason", "ops",
        {"{{finished_reason}}": f"sum by (finished_reason) (rate(@request_success_total[{WINDOW}]))"},
    ),
    (
        "Errors by status and code", "ops",
        {"{{status}} {{code}}": f"sum by (status, code) (rate(@request_errors_total[{WINDOW}]))"},
    ),
    (
        "Refused by reason", "ops",
        {"{{reason}}": f"sum by (reason) (rate(@requests_refused_total[{WINDOW}]))"},
    ),
    (
        "Restarts of the engine, and requests tried again", "short",
        {
            "restarts": "sum(increase(@engine_restarts_total[1h]))",
            "tried again": "sum(increase(@request_retries_total[1h]))",
        },
    ),
    (
        "Memory", "bytes",
        {"API process": "sum(process_resident_memory_bytes{})", "graphs": "sum(@graph_bytes)"},
    ),
]  # fmt: skip
"""Title, unit, and queries by legend."""


def panel(number: int, kind: str, title: str, unit: str, queries: dict[str, str], at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"datasource": SOURCE, "expr": query(text), "legendFormat": legend, "refId": chr(ord("A") + place)}
        for place, (legend, text) in enumerate(queries.items())
    ]
    custom = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"} if kind == "timeseries" else {}
    return {
        "id": number, "type": kind, "title": title, "datasource": SOURCE, "gridPos": at, "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if kind == "timeseries"
        else {"colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"]}},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels = [
        panel(place + 1, "stat", title, unit, {title: text}, {"x": 4 * place, "y": 0, "w": 4, "h": 4})
        for place, (title, text, unit) in enumerate(STATS)
    ]
    for place, (title, unit, queries) in enumerate(GRAPHS):
        at = {"x": 12 * (place % 2), "y": 4 + 8 * (place // 2), "w": 12, "h": 8}
        panels.append(panel(len(panels) + 1, "timeseries", title, unit, queries, at))
    models = {
        "name": "model", "label": "Model", "type": "query", "datasource": SOURCE, "multi": True, "includeAll": True,
        "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
        "query": "label_values(unisono:engine_up, model_name)", "definition": "",
    }  # fmt: skip
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "unisono", "title": "Unisono", "tags": ["llm"], "schemaVersion": 39, "version": 1, "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"}, "timezone": "browser", "editable": True,
        "templating": {"list": [source, models]}, "panels": panels,
    }  # fmt: skip


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
