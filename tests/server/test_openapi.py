"""Our routes against their own description, by schemathesis: requests right and wrong, at random.

Properties:
- every answer has a status, a content type and a body that the server's /openapi.json declares, for
  requests that fit the schema and for requests that do not;
- no answer is a 5xx, since nothing is wrong with the server;
- neither with a token and an API key, nor with wrong ones (401, 429);
- what is nearly a weight update is refused or taken, and can be given up;
- after all of it the same policy is served, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks, not_a_server_error
from schemathesis.core.failures import FailureGroup

from tests.client import Client
from tests.models import Kind
from tests.server.test_weight_updates import PROMPTS, Subject
from tests.servers import API_KEY, TOKEN
from vllm_parity_plugin.serving import Server
from vllm_parity_plugin.weights.messages import UploadRequest
from vllm_parity_plugin.wire import PREFIX, TOKEN_HEADER

load_all_checks()
CONFORMANCE = [
    not_a_server_error,
    *(
        CHECKS.get_one(name)
        for name in (
            "status_code_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
        )
    ),
]
EXAMPLES = 25
REPEATABLE = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [
    ("GET", f"{PREFIX}/status"),
    ("GET", f"{PREFIX}/weights"),
    ("POST", f"{PREFIX}/weights"),
    ("POST", f"{PREFIX}/weights/uploads"),
    ("GET", f"{PREFIX}/weights/uploads/{{upload_id}}"),
    ("PUT", f"{PREFIX}/weights/uploads/{{upload_id}}"),
    ("DELETE", f"{PREFIX}/weights/uploads/{{upload_id}}"),
    ("POST", f"{PREFIX}/weights/uploads/{{upload_id}}/commit"),
    ("POST", f"{PREFIX}/weights/uploads/{{upload_id}}/nccl"),
    ("POST", f"{PREFIX}/rollouts"),
    ("POST", f"{PREFIX}/pause"),
    ("POST", f"{PREFIX}/resume"),
]


def ours(document: dict[str, Any]) -> dict[str, Any]:
    """The part of a server's OpenAPI document that is about our routes."""
    paths = {path: item for path, item in document["paths"].items() if path.startswith(PREFIX)}
    return document | {"paths": paths}


def cases(document: dict[str, Any], method: str, path: str, mode: GenerationMode) -> Any:
    schema = schemathesis.openapi.from_dict(document)
    return schema[path][method].as_strategy(generation_mode=mode)


def bounded(case: Case) -> Case:
    """The same request for little work: a tiny model on a CPU samples 1,000 tokens a second."""
    body = case.body
    if not isinstance(body, dict):
        return case
    body = copy.deepcopy(body)
    sampling = body.get("sampling")
    for owner, field, limit in ((body, "n", 3), (sampling, "max_tokens", 4)):
        if isinstance(owner, dict) and isinstance(owner.get(field), int) and owner[field] > limit:
            owner[field] = limit
    case.body = body
    return case


def check(case: Case, url: str, headers: dict[str, str]) -> int:
    """Status of the answer, which must be as described."""
    response = case.call(base_url=url, headers=headers, timeout=60)
    case.validate_response(response, checks=CONFORMANCE)
    return int(response.status_code)


def all_statuses(
    document: dict[str, Any],
    url: str,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    modes: tuple[GenerationMode, ...] = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE),
) -> set[int]:
    """Statuses that random requests to one operation were answered with."""
    found: set[int] = set()
    for mode in modes:

        @REPEATABLE
        @given(cases(document, method, path, mode))
        def run(case: Case) -> None:
            found.add(check(bounded(case), url, headers or {}))

        run()
    return found


@pytest.fixture(scope="module")
def described(server: Server) -> Iterator[tuple[Subject, dict[str, Any]]]:
    """A server and its description; what it serves is compared after all tests."""
    subject = Subject(server, Path(Client(server).status().model))
    document = subject.client.http.get("/openapi.json").json()
    before = subject.fingerprint()
    yield subject, ours(document)
    subject.client.http.post(f"{PREFIX}/resume")
    assert subject.client.status().state == "serving"
    assert subject.client.status().policy_version == 0
    assert subject.fingerprint() == before


def test_every_route_is_described(described: tuple[Subject, dict[str, Any]]) -> None:
    """Each with the errors that any of ours can answer, in one shape."""
    _, document = described
    found = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert found == set(OPERATIONS)
    for item in document["paths"].values():
        for operation in item.values():
            assert {"400", "401", "404", "422", "429", "503"} <= operation["responses"].keys()
            errors = {k: r for k, r in operation["responses"].items() if k >= "400"}
            assert all("application/json" in answer["content"] for answer in errors.values())


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: value)
def test_answers_are_as_described(
    described: tuple[Subject, dict[str, Any]], method: str, path: str
) -> None:
    subject, document = described
    operation = document["paths"][path][method.lower()]
    # Any text is a path: without a body or a header, nothing can be against the schema.
    places = {parameter["in"] for parameter in operation.get("parameters", [])}
    wrong = "requestBody" in operation or "header" in places
    modes = (GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if wrong else []))
    try:
        found = all_statuses(document, subject.server.url, method, path, modes=modes)
    finally:  # a pause would hold the next rollouts for ever
        subject.client.http.post(f"{PREFIX}/resume")
    assert found and max(found) < 500
    assert subject.client.http.get("/health").status_code == 200


def test_rollouts_are_reached(described: tuple[Subject, dict[str, Any]]) -> None:
    """Random prompts seldom fit; these do, and what varies is how they are sampled."""
    subject, document = described
    sampling = document["components"]["schemas"]["Sampling"]
    found: set[int] = set()
    schema = copy.deepcopy(document)
    request = schema["components"]["schemas"]["RolloutRequest"]
    request["properties"]["prompts"] = {"type": "array", "enum": [PROMPTS[:1], PROMPTS]}
    request["required"] = ["prompts", "sampling"]
    assert sampling["properties"].keys() >= {"temperature", "top_p", "top_k", "min_p"}

    @settings(REPEATABLE, max_examples=60)
    @given(cases(schema, "POST", f"{PREFIX}/rollouts", GenerationMode.POSITIVE))
    def run(case: Case) -> None:
        found.add(check(bounded(case), subject.server.url, {}))

    run()
    assert 200 in found


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from([2**31, -1, 2**63, 10**30, "F32", "BF16", "full", "lora", "__metadata__"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places in a JSON value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(path for key, item in inner for path in paths_of(item, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def test_nearly_an_update(
    described: tuple[Subject, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A right manifest with one value replaced: opened or refused, as described, never a 5xx."""
    import torch

    from vllm_parity_plugin.weights.writer import write_policy

    subject, document = described
    http, info = subject.client.http, subject.client.weights_info()
    path = tmp_path_factory.mktemp("nearly") / "policy"
    tensors = ((name, torch.zeros(spec.shape)) for name, spec in info.tensors.items())
    entries = write_policy(path, tensors, info.tensors)
    right = UploadRequest(version=1, model=info.model, tensors=entries).model_dump(mode="json")
    first = next(iter(entries))
    places = [p for p in paths_of(right) if p[:1] != ("tensors",) or p[1:2] in ((), (first,))]
    operation = schemathesis.openapi.from_dict(document)[f"{PREFIX}/weights/uploads"]["POST"]
    found: set[int] = set()

    @settings(REPEATABLE, max_examples=80)
    @given(st.sampled_from(places), json_values)
    def run(place: tuple[Any, ...], value: Any) -> None:
        body = replaced(right, place, value)
        case = operation.Case(body=body, media_type="application/json")
        response = case.call(base_url=subject.server.url, timeout=60)
        case.validate_response(response, checks=CONFORMANCE)
        found.add(response.status_code)
        if response.status_code == 201:
            upload_id = response.json()["upload_id"]
            assert http.delete(f"{PREFIX}/weights/uploads/{upload_id}").status_code == 204

    run()
    assert {400, 422} <= found <= {201, 400, 409, 422}


RIGHT = {"authorization": f"Bearer {API_KEY}", TOKEN_HEADER: TOKEN}
WRONG = {
    "none": ({}, {401}),
    "a wrong API key": (RIGHT | {"authorization": "Bearer x"}, {401}),
    "right": (RIGHT, {404}),
}


@pytest.mark.parametrize("who", WRONG)
@pytest.mark.parametrize(("method", "path"), [OPERATIONS[4], OPERATIONS[7]], ids=lambda v: v)
def test_credentials(
    tied_server: Server, tiny_model: Callable[[Kind], Path], who: str, method: str, path: str
) -> None:
    """401 in the declared shape, whichever of the two checks refused; the right ones pass."""
    headers, expected = WRONG[who]
    client = Client(tied_server, token=TOKEN, api_key=API_KEY)
    document = ours(client.http.get("/openapi.json").json())
    positive = (GenerationMode.POSITIVE,)
    assert all_statuses(document, tied_server.url, method, path, headers, positive) == expected


def test_strangers(described: tuple[Subject, dict[str, Any]]) -> None:
    """Somebody else's address: ten 401, then 429, both as described; the host itself is let in."""
    subject, document = described
    headers, positive = {"x-forwarded-for": "203.0.113.9"}, (GenerationMode.POSITIVE,)
    method, path = OPERATIONS[4]
    found = all_statuses(document, subject.server.url, method, path, headers, positive)
    assert found == {401, 429}
    assert subject.client.status().state == "serving"


# Controls.


def test_the_checks_find_what_is_wrong() -> None:
    """An undeclared 500, an undeclared status and a body of another shape are each caught."""
    app = FastAPI()

    @app.get("/fails")
    def fails() -> Any:
        return JSONResponse({"detail": "Internal Server Error"}, 500)

    @app.get("/strange", responses={200: {"description": "a number"}})
    def strange() -> Any:
        return JSONResponse({"a": 1}, 418)

    @app.get("/shape", response_model=dict[str, int])
    def shape() -> Any:
        return JSONResponse({"a": "text"})

    @app.get("/right")
    def right() -> dict[str, int]:
        return {"a": 1}

    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for path in ("/fails", "/strange", "/shape"):
        case = schema[path]["GET"].Case()
        response = case.call()
        with pytest.raises(FailureGroup):
            case.validate_response(response, checks=CONFORMANCE)
    case = schema["/right"]["GET"].Case()
    case.validate_response(case.call(), checks=CONFORMANCE)
