"""Pictures and videos over HTTP, in the wire formats of OpenAI, Anthropic, SGLang and vLLM: what reaches the engine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.server import pictures_ as pics
from tests.server.conftest import Server, servers, until
from tests.server.pictures_ import data_url, part, text
from unisono.frontend.media.settings import MediaSettings
from unisono.server.body import load_object
from unisono.server.errors import ApiError

CHAT = "/v1/chat/completions"
CONTEXT = 2048
CAT, DOG = pics.picture(96, 64, 1), pics.picture(70, 130, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pics.write_checkpoint(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "cat.png").write_bytes(pics.encoded(CAT))
    (path.parent / "secret.png").write_bytes(pics.encoded(CAT))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    return path


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """A host with the cat; /slow takes 2 s."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/slow":
                time.sleep(2)
            if self.path == "/private":
                self.send_response(302)
                self.send_header("location", "http://169.254.169.254/latest")
            else:
                self.send_response(200)
            self.end_headers()
            self.wfile.write(pics.encoded(CAT))

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def sees(directory: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that sees, which fetches from this machine."""
    media = {
        "allowed_local_media_path": str(files),
        "allowed_media_domains": ["127.0.0.1", "169.254.169.254"],
        "limit_mm_per_prompt": {"image": 3, "video": 1},
        "media_max_mb": 2,
        "mm_processor_kwargs": {"max_pixels": 200_000},
    }
    with servers(tmp_path_factory) as start:
        options = {"vision": pics.vision(), "max_model_len": CONTEXT, "media": media, "fetches_loopback": True}
        yield start(directory, step_seconds=0.001, **options)


@pytest.fixture(scope="module")
def strict(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with the flags' defaults."""
    with servers(tmp_path_factory) as start:
        media = {"allowed_media_domains": ["*"], "media_timeout": 2.0}
        yield start(directory, vision=pics.vision(), max_model_len=CONTEXT, media=media)


def ask(server: Server, *content: Any, path: str = CHAT, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    return server.http.post(path, json={"messages": messages, "max_tokens": 2, **more})


def got(server: Server) -> list[dict[str, Any]]:
    """What the engine got of the last request with pictures."""
    return server.info()["media"]


def digests(server: Server) -> list[str]:
    return [one["digest"] for one in got(server)]


@pytest.fixture(scope="module")
def cat(sees: Server) -> str:
    """The digest of the cat."""
    assert ask(sees, part(data_url(CAT))).status_code == 200
    return digests(sees)[0]


def test_two_pictures(sees: Server, directory: Path) -> None:
    """Ids are those of transformers' processor on what the template wrote; the picture's tokens are in usage."""
    content = [text("This "), part(data_url(CAT)), text(" or "), part(data_url(DOG), detail="high"), text("?")]
    conversation = [
        {"role": "system", "content": "See."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "The dog."},
        {"role": "user", "content": [part(data_url(CAT)), text("And now?")]},
    ]
    answer = sees.openai.chat.completions.create(
        model="fake", messages=conversation, max_tokens=2,  # type: ignore[arg-type]
        extra_body={"return_token_ids": True, "return_prompt_text": True},
    )  # fmt: skip
    told = answer.model_dump()
    wanted = pics.processor(directory)(text=[told["prompt_text"]], images=[CAT, DOG, CAT])
    ids = list(wanted["input_ids"][0])
    assert told["prompt_token_ids"] == ids
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    media = got(sees)
    assert [one["grid"] for one in media] == wanted["image_grid_thw"].tolist()
    assert media[0]["digest"] == media[2]["digest"] != media[1]["digest"]
    image = pics.vision()["image_token_id"]
    assert [p for one in media for p in one["positions"]] == [i for i, token in enumerate(ids) if token == image]
    assert all(one["shape"] == [int(np.prod(one["grid"])), 1536] and one["dtype"] == "float32" for one in media)


@pytest.mark.parametrize(
    "shape",
    [
        {"type": "image_url", "image_url": "URL"},
        {"type": "image_url", "image_url": {"url": "URL", "detail": "auto"}, "uuid": "cat"},
        {"type": "input_image", "image_url": "URL", "detail": "auto", "file_id": None},
        {"type": "image", "image": "URL"},
        {"type": "image", "url": "URL"},
    ],
)
@pytest.mark.parametrize("form", ["data", "base64", "file", "http"])
def test_content_parts(shape: dict[str, Any], form: str, sees: Server, cat: str, files: Path, host: str) -> None:
    """Every way to name the same picture, and to bring it."""
    url = {
        "data": data_url(CAT),
        "base64": pics.base64_of(pics.encoded(CAT)),
        "file": f"file://{files}/cat.png",
        "http": f"{host}/cat.png",
    }[form]
    if form != "data" and shape["type"] != "image_url":
        pytest.skip("the others bring it the same way")
    given = {key: url if value == "URL" else value for key, value in shape.items()}
    if isinstance(given.get("image_url"), dict):
        given["image_url"] = {**given["image_url"], "url": url}
    answer = ask(sees, text("What?"), given)
    assert answer.status_code == 200, answer.text
    assert digests(sees) == [cat]


def test_tool_results(sees: Server, cat: str) -> None:
    """A tool may answer with a picture."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [text("Here:"), part(data_url(CAT))]},
    ]
    answer = sees.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert digests(sees) == [cat]


def grid(server: Server, *content: Any, **more: Any) -> list[int]:
    answer = ask(server, *content, **more)
    assert answer.status_code == 200, answer.text
    return got(server)[0]["grid"]


def test_sizes_of_pictures(sees: Server) -> None:
    """detail, min_pixels and max_pixels of the part, then of the request, then of the server's flag."""
    large = data_url(pics.picture(600, 600))
    small, medium, flag = [1, 14, 14], [1, 18, 18], [1, 26, 26]  # of at most 60,000, 90,000 and 200,000 pixels
    assert grid(sees, part(large)) == flag
    assert grid(sees, part(large, max_pixels=60_000)) == small
    nested = {"type": "image_url", "image_url": {"url": large, "max_pixels": 60_000}}
    assert grid(sees, nested) == small
    assert grid(sees, part(large), mm_processor_kwargs={"max_pixels": 90_000}) == medium
    assert grid(sees, part(large, max_pixels=60_000), mm_processor_kwargs={"max_pixels": 90_000}) == small
    assert grid(sees, part(large, detail="high")) == flag
    bounds = {"size": {"longest_edge": 1 << 24}}
    assert grid(sees, part(large), mm_processor_kwargs=bounds) == [1, 38, 38]
    low = {"type": "image_url", "image_url": {"url": large, "detail": "low"}}
    assert grid(sees, low, mm_processor_kwargs=bounds) == [1, 32, 32]
    assert grid(sees, part(data_url(CAT), min_pixels=60_000)) == [1, 14, 20]


def frame_urls(count: int) -> list[str]:
    return [data_url(pics.picture(64, 64, i)) for i in range(count)]


@pytest.mark.parametrize("form", ["list", "frames in a URL", "animated", "video part"])
def test_videos(form: str, sees: Server) -> None:
    """A list of frames, vLLM's data URL of JPEG frames, an animated file."""
    images = [pics.picture(64, 64, i) for i in range(4)]
    shapes: dict[str, dict[str, Any]] = {
        "list": {"type": "video_url", "video_url": {"url": frame_urls(4)}},
        "frames in a URL": {
            "type": "video_url",
            "video_url": {
                "url": "data:video/jpeg;base64," + ",".join(pics.base64_of(pics.encoded(one, "JPEG")) for one in images)
            },
        },
        "animated": {"type": "video_url", "video_url": {"url": data_url(pics.animated(images, 500), "image/gif")}},
        "video part": {"type": "video", "video": frame_urls(4), "fps": 2},
    }
    answer = ask(sees, shapes[form], text("?"), return_token_ids=True, return_prompt_text=True)
    assert answer.status_code == 200, answer.text
    (video,) = got(sees)
    assert (video["kind"], video["grid"], video["seconds"]) == ("video", [2, 4, 4], 1.0)
    tokens = pics.tokenizer()
    frame = f"{pics.START}{pics.VIDEO * 4}{pics.END}"
    written = answer.json()["prompt_text"].replace(pics.VIDEO, f"<0.2 seconds>{frame}<1.2 seconds>{frame}")
    assert answer.json()["prompt_token_ids"] == tokens(written)["input_ids"]


def test_speed_of_videos(sees: Server) -> None:
    def seconds(part: dict[str, Any], **more: Any) -> float:
        assert ask(sees, part, **more).status_code == 200
        return got(sees)[0]["seconds"]

    listed = {"type": "video_url", "video_url": {"url": frame_urls(4)}}
    assert seconds({**listed, "fps": 8}) == 0.25
    assert seconds(listed, mm_processor_kwargs={"fps": 4}) == 0.5
    assert seconds(listed, media_io_kwargs={"video": {"fps": 1, "num_frames": -1}}) == 2.0


def test_responses(sees: Server, cat: str) -> None:
    """input_image of the Responses API; the conversation goes on with it."""
    content = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": data_url(CAT)}]
    first = sees.openai.responses.create(
        model="fake", input=[{"role": "user", "content": content}], max_output_tokens=2
    )  # type: ignore[arg-type,list-item,misc]
    assert digests(sees) == [cat]
    assert first.usage is not None
    body = {"input": [{"role": "user", "content": content}]}
    assert sees.http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"] == first.usage.input_tokens
    assert first.usage.input_tokens > 6
    more = {"previous_response_id": first.id, "max_output_tokens": 2}
    assert sees.http.post("/v1/responses", json={"input": "And?", **more}).status_code == 200
    assert digests(sees) == [cat]
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": content}
    answer = sees.http.post("/v1/responses", json={"input": [call, output], "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    broken = [{"type": "message", "role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}]
    error = sees.http.post("/v1/responses", json={"input": broken}).json()["error"]
    assert error["param"] == "input[0].content[0].file_id"
    wrong = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "!"}]}
    ]
    error = sees.http.post("/v1/responses", json={"input": ["x"][:0] + wrong}).json()["error"]
    assert error["param"] == "input[0].content[1]"
    assert error["message"].startswith("input[0].content[1] ")


def test_messages(sees: Server, cat: str, host: str) -> None:
    """Anthropic's image blocks, base64 and url, also in results of tools."""

    def create(path: str = "/v1/messages", **body: Any) -> Any:
        answer = sees.http.post(path, json={"model": "fake", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    source: Any = {"type": "base64", "media_type": "image/png", "data": pics.base64_of(pics.encoded(CAT))}
    block: Any = {"type": "image", "source": source}
    linked: Any = {"type": "image", "source": {"type": "url", "url": f"{host}/cat.png"}}
    content = [{"type": "text", "text": "What?"}, block, linked]
    answer = create(max_tokens=2, messages=[{"role": "user", "content": content}])
    assert digests(sees) == [cat, cat]
    count = create("/v1/messages/count_tokens", messages=[{"role": "user", "content": content}])
    usage = answer["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Here"}, block]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And this?"}, block]},
    ]
    create(max_tokens=2, messages=messages)
    assert digests(sees) == [cat, cat]
    bad = {"type": "image", "source": {**source, "data": "AAAA"}}
    result["content"] = "nothing"
    body = {"model": "fake", "max_tokens": 2, "messages": [*messages[:2], {"role": "user", "content": [result, bad]}]}
    error = sees.http.post("/v1/messages", json=body).json()["error"]
    assert error["message"].startswith("messages[2].content[1] is no picture")
    for source, words in (
        ({"type": "file", "file_id": "f"}, "source.type"),
        ({"type": "url"}, "source.url"),
        (3, "source"),
    ):
        given = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        error = sees.http.post("/v1/messages", json={"model": "fake", "max_tokens": 2, "messages": given}).json()[
            "error"
        ]
        assert f"messages[0].content[0].{words}" in error["message"], error


def test_sglang(sees: Server, cat: str) -> None:
    """image_data and video_data of /generate, of one prompt and of several."""
    mark = f"{pics.START}{pics.IMAGE}{pics.END}"
    url = data_url(CAT)

    def generate(**body: Any) -> Any:
        answer = sees.http.post("/generate", json={"sampling_params": {"max_new_tokens": 1}, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    one = generate(text=f"See {mark}", image_data=url)
    assert digests(sees) == [cat]
    assert one["meta_info"]["prompt_tokens"] > 6
    generate(text=f"{mark}{mark}", image_data=[url, pics.base64_of(pics.encoded(CAT))])
    assert digests(sees) == [cat, cat]
    ids = pics.tokenizer()(f"{mark} what")["input_ids"]
    generate(input_ids=ids, image_data=[url])
    assert digests(sees) == [cat]
    film = f"{pics.START}{pics.VIDEO}{pics.END}"
    generate(text=film, video_data=data_url(pics.animated([CAT, CAT], 100)))
    assert got(sees)[0]["kind"] == "video"
    both = generate(text=[f"a {mark}", f"b {mark}", "none"], image_data=[url, [url], None])
    assert [answer["meta_info"]["prompt_tokens"] for answer in both][2] < 6
    for body, param in (
        ({"text": ["a", "b"], "image_data": url}, "image_data"),
        ({"text": mark, "image_data": [3]}, "image_data[0]"),
        ({"text": [mark, mark], "image_data": [url, "AAAA"]}, "image_data[1]"),
    ):
        error = sees.http.post("/generate", json=body).json()["error"]
        assert error["param"] == param, error


def test_tokenize(sees: Server) -> None:
    """/tokenize of a chat counts what the chat itself counts."""
    answer = ask(sees, text("What?"), part(data_url(DOG)))
    counted = ask(sees, text("What?"), part(data_url(DOG)), path="/tokenize", max_tokens=None).json()
    assert counted["count"] == answer.json()["usage"]["prompt_tokens"] == len(counted["tokens"])
    for stream in (False, True):
        one = ask(sees, part(data_url(DOG)), n=2, stream=stream)
        assert one.status_code == 200


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
    "wrong type": (data_url(b"%PDF-1.7 and so on"), "is no picture that is read here: taken are PNG, JPEG"),
    "PostScript": (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "is no picture"),
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
    assert "is picture 4 of 4; at most 3 of a prompt are taken (--limit-mm-per-prompt)" in error["message"]
    film = {"type": "video_url", "video_url": {"url": frame_urls(2)}}
    error = ask(sees, film, film).json()["error"]
    assert "is video 2 of 2; at most 1 " in error["message"]


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
        ([part(data_url(CAT)), text(pics.IMAGE)], "messages", "2 placeholders for 1 picture"),
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
        assert "is a picture, and this model takes text only. Qwen3-VL, Qwen2.5-VL and Qwen3.5" in message, (
            path,
            message,
        )


def test_large_bodies_are_read_quickly() -> None:
    """What looks for numbers that are too long in a body takes much less than an expression does, in base64 too."""
    body = b'{"a": "' + pics.base64_of(np.random.default_rng(0).bytes(6_000_000)).encode() + b'"}'
    times = []
    for work in (lambda: load_object(body), lambda: re.search(rb"[0-9]{19}", body)):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    assert times[0] < 0.6 * times[1], times
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


def test_other_requests_go_on_while_a_picture_is_decoded(sees: Server) -> None:
    """A picture of 36 million pixels takes its time; text requests are answered all the while."""
    huge = data_url(pics.encoded(Image.new("RGB", (6000, 6000), (9, 8, 7)), compress_level=1))
    ask(sees, text("warm"))
    others, took = meanwhile(sees, part(huge))
    done = [one for one in others if one < took / 2]
    assert took > 0.3
    assert len(done) >= 3, (others, took)
    assert len(done) >= 0.8 * len(others), (others, took)


def test_other_requests_go_on_while_hosts_are_slow(sees: Server, host: str) -> None:
    """More requests that wait for a host than there are places in which requests are prepared."""
    others, took = meanwhile(sees, part(f"{host}/slow"), requests=4)
    assert took >= 2
    assert len(others) >= 10
    assert max(others) < 1.5


def test_workers_end_with_the_server(strict: Server) -> None:
    """The processes that decode leave with the server, even when it is killed."""

    def named(pid: int) -> str:
        file = Path(f"/proc/{pid}/cmdline")
        return file.read_text() if file.exists() else ""

    def children(pid: int) -> list[int]:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if Path(f"/proc/{pid}").exists() else []
        return [int(one) for one in found]

    assert ask(strict, part(data_url(CAT))).status_code == 200
    below = [one for child in children(strict.process.pid) for one in (child, *children(child))]
    assert sum("frontend.media.worker" in named(one) for one in below) >= 2
    strict.kill()
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
