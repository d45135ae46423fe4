"""What stock SGLang's HTTP server does with our plugin and its front, on every release that the
plugin supports: which requests it refuses, which routes exist, and who may ask."""

import importlib.util
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import http_requests
import pytest
from engines import INSTALLED, RELEASES, folder_of, needs_sglang
from http_requests import BAD, completion
from sglang_forks import shared
from sglang_http import HttpServer, http_server
from tiny_artifacts import payload, write_folder

from oscar_zoo.engines.sglang.bounds import grammars, values
from oscar_zoo.engines.sglang.front.access import ADMINISTRATION, FrontSettings, Routes, open_routes
from oscar_zoo.engines.sglang.launch.starting import write_front

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(900)]

PROMPTS = ([5, 6, 7], list(range(100, 180)), [11])
KEY, PAGE = "a-key-of-clients", "http://page.example:8080"
CANCELLED = ("/v1/responses/resp_1/cancel", {})
ROUTES = Path(__file__).parent / "routes"


@pytest.fixture(scope="module", params=RELEASES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("served")
    pair = write_folder(folder / "pair", payload())
    front = FrontSettings.make("127.0.0.1", (PAGE,), KEY)
    settings, engine = write_front(folder, front)
    flags = ("--kv-cache-dtype=int2", f"--oscar-rotation-path={pair}", f"--oscar-front={settings}")
    more = ("--enable-metrics", "--config", str(engine))
    with http_server(request.param, folder, *flags, *more) as server:
        server.headers["Authorization"] = f"Bearer {KEY}"
        server.front = front
        yield server


def test_a_bad_request_is_refused_by_the_name_of_its_field(served: HttpServer) -> None:
    before = [served.tokens(prompt) for prompt in PROMPTS]
    found = {case: served.post(path, body) for case, (path, body, _) in BAD.items()}
    wrong = {
        case: (status, json.dumps(answer)[:300])
        for case, (status, answer) in found.items()
        if status != 400 or BAD[case][2] not in json.dumps(answer)
    }
    assert wrong == {}
    assert [served.tokens(prompt) for prompt in PROMPTS] == before


def test_requests_with_and_without_listed_tokens_share_a_batch(served: HttpServer) -> None:
    """They ended SGLang 0.5.17, though each of them is a good request."""

    def ask(number: int) -> int:
        listed = {"return_logprob": True, "token_ids_logprob": [5, 6]} if number % 2 else {}
        sampling = {"max_new_tokens": 4}
        body = {"input_ids": [5 + number] * 40, "sampling_params": sampling, **listed}
        return served.post("/generate", body)[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(24))) == {200}


@pytest.mark.parametrize("release", RELEASES)
def test_the_canary_notices_that_stored_tokens_are_lost(release: str, tmp_path: Path) -> None:
    pair = write_folder(tmp_path / "pair", payload())
    settings, engine = write_front(tmp_path, FrontSettings.make("127.0.0.1", (), KEY))
    front = FrontSettings.read(Path(settings))
    flags = ("--kv-cache-dtype=int2", f"--oscar-rotation-path={pair}", f"--oscar-front={settings}")
    more = ("--enable-metrics", "--config", str(engine), "--oscar-canary-minutes=0.005")
    rotten = tmp_path / "rotten"
    bug = {"INT2_TEST_MUTANT": "rot", "INT2_TEST_ROT": str(rotten)}
    with http_server(release, tmp_path, *flags, *more, env=bug) as server:
        server.headers["Authorization"] = f"Bearer {front.administration_key}"
        server.tokens([5, 6, 7])
        before = server.canary(lambda told: told["time_seconds"] > 0)
        assert before["divergence"] <= before["band"] <= 0.4
        rotten.touch()
        assert server.canary(lambda told: told["outside"])["divergence"] > 0.4
        shown = server.ask("GET", "/metrics")[1]
        gauges = dict(re.findall(r"^oscar_zoo_canary_(\w+)\{.*\} (\S+)$", shown, re.MULTILINE))
        assert (
            float(gauges["divergence"]) > float(gauges["band"]) > 0 < float(gauges["time_seconds"])
        )
        counted = re.findall(r"^sglang:num_requests_total\{.*\} (\S+)$", shown, re.MULTILINE)
        assert 1 <= sum(map(float, counted)) <= 2  # ours, and the one of SGLang's start
        assert server.ask("POST", "/flush_cache")[0] == 200
        server.canary(lambda told: not told["outside"])
    assert re.findall("canary (left|is back)", server.log.read_text()) == ["left", "is back"]


NESTED = "[" * 10_000 + "]" * 10_000
HOSTILE = (
    f'"response_format": {NESTED}',
    f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {NESTED}}}}}',
    f'"chat_template_kwargs": {NESTED}',
    '"chat_template_kwargs": {"tokenize": 5}',
    '"chat_template_kwargs": {"add_generation_prompt": [{}]}',
    '"chat_template_kwargs": {"chat_template": "{{"}',
    f'"tools": {NESTED}',
    f'"messages": {NESTED}',
    '"messages": [{"role": "user", "content": {"a": 1}}]',
    '"messages": [{"role": 5}]',
    '"messages": [{"role": "tool", "content": [{"type": "text", "text": null}]}]',
    '"messages": [], "tools": [{"type": "function", "function": {"name": "", "parameters": 5}}]',
)


def test_no_body_is_an_internal_error(served: HttpServer) -> None:
    usual = '{"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"):
        for more in HOSTILE:
            status, answer, _ = served.ask("POST", path, f"{usual}{more}}}".encode())
            assert status == 200 or 400 <= status < 500, (path, more[:90], answer)
            assert status == 200 or json.dumps(answer).count("error")


COUNT = "/v1/messages/count_tokens"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COUNT, {"model": "a", "messages": []}),
        ("POST", COUNT, {"model": "a", "messages": [{"role": "user", "content": []}]}),
        ("GET", "/v1/loads?include=nonsense", None),
        ("GET", "/v1/loads?include=%ff&format=prometheus", None),
    ],
)
def test_what_a_route_cannot_take_is_no_internal_error(
    served: HttpServer, method: str, path: str, body: object
) -> None:
    status, answer, _ = served.ask(method, path, body)
    assert status == 400 and "error" in answer


def test_an_answer_ends_whose_grammar_takes_longer_with_each_token() -> None:
    """It would keep everybody waiting. Others take as many tokens as they want."""
    import xgrammar

    tokens = xgrammar.TokenizerInfo([*map(chr, range(97, 123)), "</s>"], stop_token_ids=[26])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1)
    kept = {}
    for name, text in {"slow": "root ::= e\ne ::= e e | [a-z]", "quick": "root ::= [a-z]*"}.items():
        matcher = grammars.followed(xgrammar.GrammarMatcher)(compiler.compile_grammar(text))
        kept[name], began = 0, time.process_time()
        while kept[name] < 1000 and not matcher.is_terminated():
            assert matcher.accept_token(kept[name] % 26)
            kept[name] += 1
        assert time.process_time() - began < 5
        matcher.rollback(1)
    assert kept["quick"] == 1000 and 10 < kept["slow"] < 1000


def test_an_id_of_a_client_ends_nothing(served: HttpServer) -> None:
    """Ids that are the beginnings of all others, in many requests at once, and streamed."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    plain = {"input_ids": [5, 6, 7], "sampling_params": sampling}
    ids = [f"{number:x}" for number in range(16)] + ["", "x" * 300]
    bodies = [plain, *({**plain, "rid": one} for one in ids)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: served.post("/generate", body), bodies))
    assert [status for status, _ in answers] == [200] * len(answers)
    assert [answer["meta_info"]["id"] for _, answer in answers[1:]] == ids
    assert {len(answer["output_ids"]) for _, answer in answers} == {8}
    status, streamed, _ = served.ask("POST", "/generate", {**plain, "rid": "0", "stream": True})
    assert status == 200 and '"id":"0"' in streamed.replace(" ", "")
    several = {**plain, "input_ids": [[5], [6]], "rid": ["1", "11"]}
    status, both = served.post("/generate", several)
    assert [one["meta_info"]["id"] for one in both] == ["1", "11"]


def test_a_stream_that_is_refused_says_so(served: HttpServer) -> None:
    status, answer = served.post("/generate", {"input_ids": [99999999], "stream": True})
    assert status == 400 and "holds token 99999999" in answer["error"]["message"]
    body = {"model": "default", "prompt": [99999999], "stream": True}
    status, answer = served.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    for path, more in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        status, answer = served.post(path, {"model": "a", "stream": True, "ebnf": "x ::=", **more})
        assert status == 400 and "ebnf" in json.dumps(answer)
    time.sleep(2.5)  # SGLang ends requests whose client is gone two seconds later
    assert "is_single" not in served.log.read_text("utf-8", "replace")


def test_an_answer_to_a_bad_request_has_the_form_of_openai(served: HttpServer) -> None:
    path, body, _ = completion("max_tokens", n=1000)
    status, answer = served.post(path, body)
    assert status == 400 and answer["error"]["message"].startswith("sampling_params.n must be")
    assert {name: answer["error"][name] for name in ("type", "param", "code")} == {
        "type": "invalid_request_error",
        "param": "n",
        "code": 400,
    }


def test_the_responses_api_says_what_it_lacks(served: HttpServer) -> None:
    """SGLang leaves its part of the server out where a package is missing, and answers 500."""
    if importlib.util.find_spec("openai_harmony") is not None:
        pytest.skip("openai-harmony is installed, so this API works")
    for path, body in (("/v1/responses", {"model": "default", "input": "a"}), CANCELLED):
        status, answer = served.post(path, body)
        assert (status, answer["error"]["code"]) == (501, "not_implemented")
        assert "pip install openai-harmony" in answer["error"]["message"]


def test_the_list_of_routes_says_open_or_closed_for_all(served: HttpServer, tmp_path: Path) -> None:
    """A route that a release adds is in no list, so this names it, and clients do not reach it."""
    out, log = tmp_path / "out", tmp_path / "log"
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    forks = shared(folder_of(served.release))
    code = forks.call("sglang_http:routes", tmp_path, log, variables, out=str(out))
    assert code == 0, log.read_text()
    opened = open_routes(served.release)
    administered = Routes.of(ADMINISTRATION)
    found = []
    for method, path in json.loads(out.read_text()):
        is_open = method != "WEBSOCKET" and opened.has(path, method)
        state = "open" if is_open else "ours" if administered.has(path, method) else "closed"
        found.append(f"{state:<6} {method:<9} {path}")
    recorded = ROUTES / f"{served.release}.txt"
    assert "\n".join(sorted(found)) + "\n" == recorded.read_text()


def test_closed_routes_do_not_exist_for_clients(served: HttpServer) -> None:
    lines = (ROUTES / f"{served.release}.txt").read_text().splitlines()
    closed = [line.split()[1:] for line in lines if not line.startswith("open")]
    assert len(closed) > 50
    for method, path in closed:
        if method != "WEBSOCKET":
            concrete = re.sub(r"\{.*?\}", "x", path)
            status, answer, _ = served.ask(method, concrete)
            assert status == 404, (method, path, answer)
            assert method == "HEAD" or "closed" in answer["error"]["message"]
    for path in ("/generate/", "//generate", "/v1/../abort_request", "/GENERATE"):
        assert served.ask("POST", path, {})[0] == 404


def test_a_websocket_is_refused(served: HttpServer) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert served.ask("GET", "/v1/realtime", headers=upgrade)[0] in (400, 403, 404)


def test_only_the_administration_key_opens_administration(served: HttpServer) -> None:
    key = served.front.administration_key
    assert served.ask("POST", "/flush_cache")[0] == 404
    administration = {"Authorization": f"Bearer {key}"}
    assert served.ask("POST", "/flush_cache", headers=administration)[0] == 200
    for closed in ("/update_weights_from_disk", "/abort_request", "/set_internal_state"):
        assert served.ask("POST", closed, {}, administration)[0] == 404


def test_a_request_needs_the_key(served: HttpServer) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    for wrong in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
        status, answer, headers = served.ask("POST", "/generate", body, {"Authorization": wrong})
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert headers["WWW-Authenticate"] == "Bearer"
    nothing = {"Authorization": ""}
    assert served.ask("POST", "/generate", body, {**nothing, "X-API-Key": KEY})[0] == 200
    assert served.ask("GET", "/v1/models", headers=nothing)[0] == 401
    assert served.ask("GET", "/health_generate", headers=nothing)[0] == 401
    assert served.ask("GET", "/health", headers=nothing)[0] == 200
    status, metrics, _ = served.ask("GET", "/metrics", headers=nothing)
    assert status == 200 and "oscar_int2_" in metrics


def test_everything_that_listens_is_on_loopback(served: HttpServer) -> None:
    found = served.listeners()
    assert len(found) > 1 and found[str(served.port)] == ["127.0.0.1"]
    assert {address for addresses in found.values() for address in addresses} == {"127.0.0.1"}


def test_two_ranks_find_each_other_on_loopback(tmp_path: Path) -> None:
    pair = write_folder(tmp_path / "pair", payload())
    flags = ("--kv-cache-dtype=int2", f"--oscar-rotation-path={pair}", "--tp-size=2")
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with http_server(INSTALLED, tmp_path, *flags, "--oscar-front=on", env=bind) as server:
        status, metrics, _ = server.ask("GET", "/metrics")
        assert status == 501 and "--enable-metrics" in metrics["error"]["message"]
        found = server.listeners()
        assert len(found) > 3
        assert {address for addresses in found.values() for address in addresses} == {"127.0.0.1"}
        assert len(server.tokens([5, 6, 7])) == 8


def test_keys_are_nowhere_in_what_a_server_says(served: HttpServer) -> None:
    for path in ("/server_info", "/get_server_info", "/model_info", "/v1/models", "/oscar_front"):
        status, answer, _ = served.ask("GET", path)
        assert status == 200 and isinstance(answer, dict)
        assert [one for one in served.front.secrets if one in json.dumps(answer)] == []
    assert served.ask("GET", "/server_info")[1]["internal_states"][0]["oscar_int2"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_origin_can_do_nothing(served: HttpServer, site: str) -> None:
    page = {"Origin": "http://evil.example"}
    body = {"input_ids": [5]}
    for method, path in (("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/health")):
        status, _, headers = served.ask(method, path, body if method == "POST" else None, page)
        assert status == 403 and "access-control-allow-origin" not in headers
    for path in ("/update_weights_from_disk", "/configure_logging", "/flush_cache"):
        assert served.ask("POST", path, {}, page)[0] == 403
    status, _, headers = served.ask(
        "OPTIONS", "/generate", headers={**page, "Access-Control-Request-Method": "POST"}
    )
    assert status == 403 and "access-control-allow-origin" not in headers
    assert served.ask("GET", "/v1/models", headers={"Sec-Fetch-Site": site})[0] == 403
    assert served.ask("GET", "/v1/models", headers={"Sec-Fetch-Site": "none"})[0] == 200
    assert served.ask("GET", "/v1/models", headers={"Origin": "null"})[0] == 403


PAGE_OF_AN_ATTACKER = """<!doctype html><script>
const server = SERVER, found = {};
const body = JSON.stringify({input_ids: [5], sampling_params: {max_new_tokens: 1}});
const json = {"Content-Type": "application/json"}, bearer = {"Authorization": "Bearer KEY"};
const tries = {
  read: () => fetch(server + "/v1/models").then(answer => answer.text()),
  metrics: () => fetch(server + "/metrics").then(answer => answer.text()),
  ask: () => fetch(server + "/generate", {method: "POST", body, headers: json})
    .then(answer => answer.text()),
  plain: () => fetch(server + "/generate", {method: "POST", body}).then(answer => answer.text()),
  key: () => fetch(server + "/v1/models", {headers: bearer}).then(answer => answer.text()),
  beacon: () => Promise.resolve(navigator.sendBeacon(server + "/update_weights_from_disk", body))
    .then(() => { throw "sent, unread"; }),
  blind: () => fetch(server + "/flush_cache", {method: "POST", body, mode: "no-cors"})
    .then(answer => answer.type == "opaque" ? Promise.reject("opaque") : answer.text()),
  image: () => new Promise((good, bad) => {
    const image = new Image(); image.onload = () => good("loaded"); image.onerror = bad;
    image.src = server + "/health_generate";
  }),
  socket: () => new Promise((good, bad) => {
    const socket = new WebSocket(server.replace("http", "ws") + "/v1/realtime");
    socket.onopen = () => good("open"); socket.onerror = () => bad("closed");
  }),
};
(async () => {
  for (const [name, attempt] of Object.entries(tries))
    found[name] = await attempt().then(text => "read " + text, () => "nothing");
  await fetch("/said", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.mark.skipif(http_requests.BROWSER is None, reason="no Chromium to open a page with")
def test_a_page_in_a_browser_reads_and_changes_nothing(served: HttpServer, tmp_path: Path) -> None:
    """A page of another port of this machine, and one whose name is bound to the server's
    address."""
    if served.release != INSTALLED:
        pytest.skip("the front is the same for every release")
    address = f"http://127.0.0.1:{served.port}"
    page = PAGE_OF_AN_ATTACKER.replace("KEY", KEY)
    with http_requests.serving(page.replace("SERVER", json.dumps(address))) as evil:
        found = evil.opened(f"http://127.0.0.1:{evil.port}/", tmp_path / "a")
    assert set(found.values()) == {"nothing"} and len(found) == 9
    rebound = f"http://rebound.example:{served.port}"
    hosts = "--host-resolver-rules=MAP *.example 127.0.0.1"
    with http_requests.serving(page.replace("SERVER", json.dumps(rebound))) as evil:
        found = evil.opened(f"http://page.example:{evil.port}/", tmp_path / "b", hosts)
    assert set(found.values()) == {"nothing"}
    log = served.log.read_text()
    asked = re.findall(r'"(?:GET|POST|OPTIONS) (\S+) HTTP/1.1" (\d+)', log)
    assert ("/update_weights_from_disk", "403") in asked and ("/flush_cache", "403") in asked
    assert ("/update_weights_from_disk", "200") not in asked


@pytest.mark.skipif(http_requests.BROWSER is None, reason="no Chromium to open a page with")
def test_a_page_of_an_opened_origin_reads_in_a_browser(served: HttpServer, tmp_path: Path) -> None:
    if served.release != INSTALLED:
        pytest.skip("the front is the same for every release")
    page = PAGE_OF_AN_ATTACKER.replace("KEY", KEY)
    page = page.replace("SERVER", json.dumps(f"http://127.0.0.1:{served.port}"))
    with http_requests.serving(page) as friend:
        hosts = f"--host-resolver-rules=MAP page.example:8080 127.0.0.1:{friend.port}"
        found = friend.opened(f"{PAGE}/", tmp_path, hosts)
    assert found["key"].startswith('read {"object":"list"') and found["beacon"] == "nothing"
    assert "invalid_api_key" in found["read"] and "invalid_api_key" in found["ask"]


def test_an_origin_that_was_opened_may_ask_and_read(served: HttpServer) -> None:
    page = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    status, _, headers = served.ask("OPTIONS", "/v1/models", headers={**page, **asked})
    assert status == 204 and headers["access-control-allow-headers"] == "x-a"
    status, _, headers = served.ask("GET", "/v1/models", headers=page)
    assert status == 200 and headers.get_all("access-control-allow-origin") == [PAGE]
    assert "access-control-allow-credentials" not in headers
    assert served.ask("POST", "/abort_request", {}, page)[0] == 404


def test_a_name_that_is_not_this_server_is_refused(served: HttpServer) -> None:
    rebound = {"Host": "rebound.example:30000", "Authorization": ""}
    assert served.ask("GET", "/oscar_front", headers=rebound)[0] == 403
    for name in ("localhost:9", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        called = {"Host": name, "Authorization": ""}
        assert served.ask("GET", "/oscar_front", headers=called)[0] == 200
    # A page does not know the key, so whoever sends it is no page.
    assert served.ask("GET", "/v1/models", headers={"Host": "rebound.example"})[0] == 200


def test_a_long_body_is_refused(served: HttpServer) -> None:
    status, answer, _ = served.ask("POST", "/generate", None, {"Content-Length": str(65 << 20)})
    assert status == 413 and "64 MiB" in answer["error"]["message"]


QUICK = ("[0-9]{1,20}\\.", "END", "(yes|no)", "a{4}(bc){2}", "\\n\\n$", "")
SLOW = ("a*", "a+?", "(ab){1,9}", "(a|a){2,3}", "(a)\\1", "(?=a)b", "a{1,9}b{1,9}c{1,9}", "a{300}")


@pytest.mark.parametrize("good", QUICK)
def test_quick_stop_expressions_are_allowed(good: str) -> None:
    assert values.stop_pattern(good) is None


@pytest.mark.parametrize("bad", [*SLOW, "["])
def test_stop_expressions_that_can_take_long_are_not(bad: str) -> None:
    assert values.stop_pattern(bad) is not None
