"""Serves a fake engine in a process of its own: ``python -m tests.http.launch MODEL_DIR '{"step_seconds": 0.1}'``.

The server is imported in :func:`main`: engine processes import this module again, and need none of it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path


def main() -> None:
    from tests.http.fake_engine import FakeConfig
    from unisono.cluster.replicas.plan import ReplicaSettings
    from unisono.http.limits.overload import LoadLimits
    from unisono.http.limits.sizes import Limits
    from unisono.http.security.auth import ClientLimits
    from unisono.http.server import ServerSettings, serve
    from unisono.http.settings import HttpSettings
    from unisono.media.fetching.fetch import Fetcher, resolve
    from unisono.media.settings import MediaSettings
    from unisono.types import UnisonoError

    fields = [field.name for field in dataclasses.fields(ServerSettings) if field.name not in ("model_path", "names")]
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[2])
    settings = {name: options.pop(name) for name in fields if name in options}
    settings = {"port": 0, **settings}
    if "limits" in settings:
        settings["limits"] = Limits(**settings["limits"])
    if "load" in settings:
        client = ClientLimits(**settings["load"].pop("client", {}))
        settings["load"] = LoadLimits(**settings["load"], client=client)
    scale = [field.name for field in dataclasses.fields(ReplicaSettings)]
    settings["scale"] = ReplicaSettings(**{name: options.pop(name) for name in scale if name in options})
    settings.setdefault("restart_engine", settings["scale"].several)
    if "http" in settings:
        settings["http"] = HttpSettings(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in settings["http"].items()}
        )
    if "media" in settings:
        settings["media"] = MediaSettings.of(**settings["media"])
    if options.pop("fetches_loopback", False):  # pictures of the tests' own host
        Fetcher.__init__.__defaults__ = (resolve, lambda address: address == "127.0.0.1")
    for name in ("api_key_file", "allowed_lora_path"):
        if name in settings:
            settings[name] = Path(settings[name])
    engine = "tests.http.fake_engine:FakeEngine"
    try:
        serve(FakeConfig(**options), ServerSettings(Path(sys.argv[1]), ("fake", "alias"), engine=engine, **settings))
    except UnisonoError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
