"""Serves a fake engine in a process of its own: ``python -m tests.server.launch MODEL_DIR '{"step_seconds": 0.1}'``."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

from tests.server.fake_engine import FakeConfig
from unisono.frontend.media.fetch import Fetcher, resolve
from unisono.frontend.media.settings import MediaSettings
from unisono.server.auth import ClientLimits
from unisono.server.limits import Limits
from unisono.server.overload import LoadLimits
from unisono.server.run import ServerSettings, serve
from unisono.types import UnisonoError

SETTINGS = [field.name for field in dataclasses.fields(ServerSettings) if field.name not in ("model_path", "names")]


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[2])
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    settings = {"port": 0, **settings}
    if "limits" in settings:
        settings["limits"] = Limits(**settings["limits"])
    if "load" in settings:
        client = ClientLimits(**settings["load"].pop("client", {}))
        settings["load"] = LoadLimits(**settings["load"], client=client)
    if "media" in settings:
        settings["media"] = MediaSettings.of(**settings["media"])
    if options.pop("fetches_loopback", False):  # pictures of the tests' own host
        Fetcher.__init__.__defaults__ = (resolve, lambda address: address == "127.0.0.1")
    if "api_key_file" in settings:
        settings["api_key_file"] = Path(settings["api_key_file"])
    engine = "tests.server.fake_engine:FakeEngine"
    try:
        serve(FakeConfig(**options), ServerSettings(Path(sys.argv[1]), ("fake", "alias"), engine=engine, **settings))
    except UnisonoError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
