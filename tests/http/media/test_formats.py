"""Pictures and videos over HTTP, in the wire formats of OpenAI, Anthropic, SGLang and vLLM: what reaches the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.http import pictures_ as pics
from tests.http.conftest import Server
from tests.http.media.requests_ import CAT, CHAT, DOG, ask, digests, frame_urls, got
from tests.http.pictures_ import data_url, part, text


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
    assert error["message"].startswith("messages[2].content[1] is not an image")
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
