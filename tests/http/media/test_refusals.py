"""Pictures that are wrong, pictures that are slow, and the flags: each refusal names the part and the limit."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.http import pictures_ as pics
from tests.http.conftest import Server, Start, in_one_try, until
from tests.http.media.requests_ import CAT, CHAT, ask, frame_urls
from tests.http.pictures_ import data_url, part, text
from unisono.http.errors import ApiError
from unisono.http.request_body import load_object
from unisono.media.settings import MediaSettings

# ---- what is wrong with a picture -------------------------------------------------------------------

SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>'
PNG = pics.encoded(CAT)
JPEG = pics.encoded(pics.picture(300, 300), "JPEG")
BAD: dict[str, tuple[Any, str]] = {
    "bomb": (
        data_url(pics.bomb(60_000, 60_000)),
        "has 60000 x 60000 = 3600000000 pixels; at most 67108864 are decoded",
    ),
    "10,000 x 10,000": (data_url(pics.bomb(10_000, 10_000)), "has 10000 x 10000 = 100000000 pixels; at most 67108864"),
    "long": (data_url(pics.encoded(Image.new("L", (4000, 2)))), "more than 200 times as long as wide"),
    "truncated PNG": (data_url(PNG[: len(PNG) // 2]), "is damaged: "),
    "truncated JPEG": (data_url(JPEG[:2000]), "is damaged: .*truncated"),
    "missing rows": (data_url(pics.bomb(900, 900)), "is damaged: "),
    "wrong type": (data_url(b"%PDF-1.7 and so on"), "is not an image in a supported format: PNG, JPEG"),
    "PostScript": (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "is not an image"),
    "SVG": (data_url(SVG, "image/svg+xml"), "is an SVG, a drawing that has no pixels: render it to PNG"),
    "MP4": (data_url(b"\0\0\0\x18ftypmp42" + bytes(50), "video/mp4"), "is an MP4 or QuickTime file.*send its frames"),
    "0 bytes": (data_url(b""), "has 0 bytes"),
    "no base64": ("data:image/png;base64,####", "is not base64"),
    "data URL without base64": ("data:image/png,%89PNG", "is a data URL without base64"),
    "too many bytes": (data_url(bytes(3 << 20)), r"is larger than 2 MiB \(--media-max-mb\)"),
    "other scheme": ("gopher://example.com/a.png", "has a URL of the scheme 'gopher'"),
    "no URL": ("", "is not valid: give a URL"),
    "number": (7, "is not valid: give a URL"),
    "null": (None, "has no content; give a URL"),
    "outside": ("file:///etc/passwd", "outside of the directory that is allowed"),
    "link": ("file://FILES/link.png", "outside of the directory that is allowed"),
    "no file": ("file://FILES/dog.png", "names a file that does not exist"),
    "other domain": ("https://example.com/a.png", "example.com, which this server does not fetch from"),
    "redirect": ("HOST/private", "leads to 169.254.169.254, whose address is not public"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures(name: str, sees: Server, files: Path, host: str) -> None:
    """400, with the part's name, what is wrong and the way out; the next request is served."""
    url, words = BAD[name]
    if isinstance(url, str):
        url = url.replace("FILES", str(files)).replace("HOST", host)
    answer = ask(sees, text("What?"), part(url))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert error["message"].startswith("messages[0].content[1]")
    assert re.search(words, error["message"]), error["message"]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9/a", "http://169.254.169.254/latest/meta-data", "http://[::1]:9/", "http://[::ffff:127.0.0.1]/",
     "http://2130706433:9/", "http://localhost:9/"],
)  # fmt: skip
def test_private_addresses(url: str, strict: Server) -> None:
    """Never, although --allowed-media-domains has *."""
    error = ask(strict, part(url)).json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "not public" in error["message"] or "no address" in error["message"], error
    error = ask(strict, part("file:///etc/passwd")).json()["error"]
    assert "start it with --allowed-local-media-path" in error["message"]


def test_too_many(sees: Server) -> None:
    url = data_url(CAT)
    error = ask(sees, *[part(url)] * 4).json()["error"]
    assert error["param"] == "messages[0].content[3]"
    assert "is image 4 of 4; the limit per prompt is 3 (--limit-mm-per-prompt)" in error["message"]
    film = {"type": "video_url", "video_url": {"url": frame_urls(2)}}
    error = ask(sees, film, film).json()["error"]
    assert "is video 2 of 2; the limit per prompt is 1 " in error["message"]


def test_more_tokens_than_the_context(sees: Server) -> None:
    """One picture too large, said before it is decoded; and two that are too large together."""
    bounds = {"max_pixels": 1 << 24}
    answer = ask(sees, part(data_url(pics.encoded(Image.new("L", (1600, 1600))))), mm_processor_kwargs=bounds)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "has 1600 x 1600 pixels, which make 2500 tokens; the model's context has room for 2047" in error["message"]
    large = part(data_url(pics.encoded(Image.new("L", (1120, 1120)))))
    error = ask(sees, large, large, mm_processor_kwargs=bounds, max_tokens=None).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ([{**part("x"), "speed": 1}], "messages[0].content[0].speed", "remove it"),
        ([part("x", detail="most")], "messages[0].content[0].detail", "auto, low, high, original"),
        ([part("x", max_pixels="many")], "messages[0].content[0].max_pixels", "a whole number"),
        ([part("x", uuid="")], "messages[0].content[0].uuid", "1 to 256 characters"),
        ([part(None, uuid="cat")], "messages[0].content[0]", "has no content"),
        ([{"type": "input_audio", "input_audio": {}}], "messages[0].content[0]", "types text, image_url"),
        ([{"type": "video_url", "video_url": {"url": []}}], "messages[0].content[0]", "a list of them, the frames"),
        ([part(data_url(CAT)), text(pics.IMAGE)], "messages", "2 placeholders for 1 image"),
    ],
)
def test_bad_parts(content: Any, param: str, words: str, sees: Server) -> None:
    answer = ask(sees, *content)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_bad_settings(sees: Server) -> None:
    for field in ("mm_processor_kwargs", "media_io_kwargs"):
        error = ask(sees, part(data_url(CAT)), **{field: {"image": {"zoom": 2}}}).json()["error"]
        assert error["param"].startswith(field), error
        assert ask(sees, text("no picture"), **{field: {"zoom": 2}}).status_code == 400
    for role in ("assistant", "system"):
        messages = [{"role": role, "content": [text("a"), part("x")]}]
        error = sees.http.post(CHAT, json={"messages": messages}).json()["error"]
        assert error["param"] == "messages[0].content[1]"
        assert "roles user and tool" in error["message"]


def test_a_model_that_sees_nothing(server: Server) -> None:
    """In every wire format: which models see."""
    url = data_url(CAT)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": [part(url)]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        "/v1/messages": {"max_tokens": 1, "model": "fake", "messages": [{"role": "user", "content": [block]}]},
        "/generate": {"text": "a", "image_data": url},
        "/tokenize": {"messages": [{"role": "user", "content": [part(url)]}]},
    }
    for path, body in bodies.items():
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        message = answer.json()["error"]["message"]
        assert (
            "is an image, and this model takes text only. Qwen3-VL, Qwen2.5-VL, Qwen2-VL, Qwen3.5, Gemma 3" in message
        ), (
            path,
            message,
        )


def test_large_bodies_are_read_quickly() -> None:
    """What looks for numbers that are too long in a body takes much less than an expression does, in base64 too."""
    body = b'{"a": "' + pics.base64_of(np.random.default_rng(0).bytes(6_000_000)).encode() + b'"}'

    def least(work: Callable[[], object]) -> float:
        """Seconds of processor time of the quickest of seven calls."""
        times = []
        for _ in range(7):
            begun = time.thread_time()
            work()
            times.append(time.thread_time() - begun)
        return min(times)

    assert least(lambda: load_object(body)) < 0.6 * least(lambda: re.search(rb"[0-9]{19}", body))
    for number in ("1234567890123456789012", "-99999999999999999999"):
        with pytest.raises(ApiError, match="64 bits"):
            load_object(body[:-1] + f', "b": {number}}}'.encode())


# ---- nobody waits -----------------------------------------------------------------------------------


def meanwhile(server: Server, *slow: dict[str, Any], requests: int = 1) -> tuple[list[float], float]:
    """Seconds of text requests while others with pictures are under way, and the seconds that these took."""
    took: list[float] = []

    def work() -> None:
        begun = time.monotonic()
        answer = httpx.post(
            f"{server.url}{CHAT}",
            json={"messages": [{"role": "user", "content": list(slow)}], "max_tokens": 1},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        took.append(time.monotonic() - begun)

    threads = [threading.Thread(target=work) for _ in range(requests)]
    for thread in threads:
        thread.start()
    others = []
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        assert ask(server, text("Hello")).status_code == 200
        others.append(time.monotonic() - begun)
        time.sleep(0.01)
    assert len(took) == requests
    return others, max(took)


def test_requests_run_while_an_image_is_decoded(sees: Server) -> None:
    """A picture of 36 million pixels takes its time; text requests are answered all the while."""
    huge = data_url(pics.encoded(Image.new("RGB", (6000, 6000), (9, 8, 7)), compress_level=1))
    ask(sees, text("warm"))

    def check() -> None:
        others, took = meanwhile(sees, part(huge))
        done = [one for one in others if one < took / 2]
        assert took > 0.3
        assert len(done) >= 3, (others, took)
        assert len(done) >= 0.8 * len(others), (others, took)

    in_one_try(check)


def test_requests_run_while_media_hosts_are_slow(sees: Server, host: str) -> None:
    """More requests that wait for a host than there are places in which requests are prepared."""

    def check() -> None:
        others, took = meanwhile(sees, part(f"{host}/slow"), requests=4)
        assert took >= 2
        assert len(others) >= 10
        assert max(others) < 1.5

    in_one_try(check)


def test_workers_end_with_the_server(directory: Path, start: Start) -> None:
    """The processes that decode leave with the server, even when it is killed."""

    def named(pid: int) -> str:
        file = Path(f"/proc/{pid}/cmdline")
        return file.read_text() if file.exists() else ""

    def children(pid: int) -> list[int]:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if Path(f"/proc/{pid}").exists() else []
        return [int(one) for one in found]

    server = start(directory, fresh=True, vision=pics.vision())
    assert ask(server, part(data_url(CAT))).status_code == 200
    below = [one for child in children(server.process.pid) for one in (child, *children(child))]
    assert sum("unisono.media.worker" in named(one) for one in below) >= 2
    server.kill()
    until(lambda: not any(named(one) for one in below))


# ---- flags ------------------------------------------------------------------------------------------


def test_flags(served: Any, tmp_path: Path) -> None:
    """In vLLM's spelling, and SGLang's; what cannot be honoured is an error that names the flag."""
    given = ["--allowed-media-domains", "a.test", "*.b.test", "--limit-mm-per-prompt", "image=2,video=1"]
    given += ["--mm-processor-kwargs", '{"max_pixels": 5000}', "--allowed-local-media-path", str(tmp_path)]
    given += ["--media-io-kwargs", '{"video": {"fps": 1}}', "--mm-processor-cache-gb", "0", "--media-timeout", "2"]
    code, output, _, settings = served("tiny", *given, "--media-max-pixels", "99", "--enable-multimodal")
    assert code == 0, output
    assert settings.media == MediaSettings(
        allowed_media_domains=("a.test", "*.b.test"),
        allowed_local_media_path=tmp_path,
        limit_mm_per_prompt={"image": 2, "video": 1},
        mm_processor_kwargs={"max_pixels": 5000},
        media_io_kwargs={"video": {"fps": 1}},
        media_max_pixels=99,
        media_timeout=2.0,
        mm_processor_cache_gb=0.0,
    )
    code, output, _, settings = served("tiny", "--limit-mm-data-per-request", '{"image": 1}')
    assert settings.media.limit_mm_per_prompt["image"] == 1
    for flag, value in (("--limit-mm-per-prompt", "{"), ("--allowed-local-media-path", "/nowhere/at/all")):
        code, output, *_ = served("tiny", flag, value)
        assert (code, flag in output) == (2, True), output
