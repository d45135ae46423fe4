"""What a server of `oscar-zoo serve` answers: the tokens of the reference, and refusals of what
does not work. It is forked; the one of `test_serve.py` is started as users do."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from cli_output import parsed
from engines import MODEL, needs_sglang, recall_prompts, text_tokens
from reference_server import ReferenceServer, equal_tokens
from served_model import WHOLE_PROMPTS, Running, fitted, serving

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.cli.main import run
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import load_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]
NEW = 16


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    artifact = fitted(tmp_path_factory.mktemp("fitted") / "rotation")
    with serving(artifact, tmp_path_factory.mktemp("temp"), forked=True) as running:
        yield running


def test_it_answers_over_the_openai_api(served: Running) -> None:
    reply = served.post(
        "/v1/completions",
        {"model": "any", "prompt": "The quick", "max_tokens": 4, "temperature": 0},
    )
    assert reply["choices"][0]["text"] and reply["usage"]["completion_tokens"] == 4
    chat = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert served.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]


def test_it_is_asked_for_facts_in_long_prompts(
    served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    url, key = f"http://127.0.0.1:{served.port}", served.temp / "key"
    asked = ["--family", "single", "--depths", "2", "--samples", "1", "--lengths", "600"]
    model = ["--model", str(MODEL), "--url", url, "--api-key-file", str(key)]
    assert run(["ruler", str(served.artifact), *model, *asked, "--json"]) == 0
    found = parsed(capsys.readouterr().out)
    assert found["servers"][url]["cache_dtype"] == "int2"
    assert [(one["depth"], one["asked"]) for one in found["cells"]] == [(0.0, 1), (1.0, 1)]


def test_ten_requests_at_once_give_the_tokens_of_the_reference(served: Running) -> None:
    """Prompts far longer than both windows, so that every decode step reads INT2 history."""
    ids = text_tokens()
    prompts = recall_prompts() + [ids[at : at + 350 + at // 50] for at in range(1000, 8000, 1000)]
    assert len(prompts) == 10

    def ask(prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        return list(
            served.post("/generate", {"input_ids": prompt, "sampling_params": sampling})[
                "output_ids"
            ]
        )

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, prompts))
    reference = reference_server(served.artifact)
    equal = sum(
        equal_tokens(answer, reference.generate(prompt, NEW))
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    assert equal > 0.8 * NEW * len(prompts)


def test_the_comparison_depends_on_the_rotation(served: Running) -> None:
    """INT2 history without a transform gives other tokens, so the test above does see the cache."""
    reference = reference_server(served.artifact)
    bare = ReferenceServer(
        reference.model, CacheSpec(None, None, reference.spec.recipe), WHOLE_PROMPTS
    )
    prompts = [text_tokens()[at : at + 450] for at in (1000, 4000)]
    assert any(bare.generate(p, NEW).answer != reference.generate(p, NEW).answer for p in prompts)


def reference_server(artifact: Path) -> ReferenceServer:
    manifest = Manifest.from_bytes((artifact / FILE_NAME).read_bytes())
    sides = []
    for role in ("k_rotation", "v_rotation"):
        entry = manifest.file(role)  # type: ignore[arg-type]
        assert entry is not None
        sides.append(read_rotation((artifact / entry.path).read_bytes(), what=entry.path))
    recipe = manifest.recipe
    return ReferenceServer(
        load_model(str(MODEL), dtype="float32"), CacheSpec(*sides, recipe), WHOLE_PROMPTS
    )


def test_beam_search_is_refused_and_the_server_goes_on(served: Running) -> None:
    body = {"text": "The quick", "sampling_params": {"max_new_tokens": 2, "beam_width": 2}}
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/generate", body)
    said = caught.value.read().decode()
    assert caught.value.code == 400 and "beam_width" in said
    assert "does not work with an INT2 KV cache" in said or version("sglang") < "0.5.21"
    assert served.post("/generate", {**body, "sampling_params": {"max_new_tokens": 2}})["text"]


def test_an_image_is_refused_by_a_model_that_reads_text_only(served: Running) -> None:
    """SGLang alone leaves the image out and answers."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "The quick"}, image]
    body = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/v1/chat/completions", body)
    assert caught.value.code == 400
    assert "text" in caught.value.read().decode()
    content.pop()
    assert served.post("/v1/chat/completions", body)["choices"]
