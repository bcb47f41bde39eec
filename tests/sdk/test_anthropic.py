"""`anthropic` for Python."""

from concurrent.futures import ThreadPoolExecutor

import anthropic
import pytest
from conftest import DIRECT, EVENT_ERROR, TEXT, TOOL_TEXT, TRANSPORT_ERRORS, fresh_prompt, through_traygate, until

KEY = "sk-ant-the-clients-own"
WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(stage):
    def build(**options):
        return anthropic.Anthropic(**{"api_key": KEY, "base_url": stage.anthropic, **options})

    return build


def message(model, prompt, **more):
    return {"model": model, "max_tokens": 64, "messages": [{"role": "user", "content": prompt}], **more}


def words(stream):
    return [event.delta.text for event in stream if event.type == "content_block_delta"]


def test_a_message_passes_both_ways_with_the_clients_own_key(stage, client):
    prompt = fresh_prompt()
    raw = client().messages.with_raw_response.create(**message("ok", prompt))
    answer = raw.parse()
    assert answer.content[0].text == TEXT
    assert answer.usage.output_tokens == 7
    [call] = stage.calls(prompt)
    # Newer SDKs send an API key as a bearer; a login's token looks otherwise.
    assert KEY in (call["headers"].get("x-api-key"), call["headers"].get("authorization", "").removeprefix("Bearer "))
    if not DIRECT:
        assert raw.headers["x-traygate-dedup"] == "miss"
        assert stage.row(raw.headers["x-traygate-call"])["outcome"] == "completed"


def test_a_stream_comes_event_by_event_raw_and_through_the_helper(client):
    assert "".join(words(client().messages.create(**message("ok", fresh_prompt()), stream=True))) == TEXT
    with client().messages.stream(**message("ok", fresh_prompt())) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == ("end_turn", 11, 7)


def test_a_tool_is_called_streamed_and_not_and_answered(client):
    prompt = fresh_prompt()
    whole = client().messages.create(**message("tool", prompt, tools=[WEATHER]))
    [called] = whole.content
    assert (whole.stop_reason, called.name, called.input) == ("tool_use", "weather", {"city": "Paris"})
    with client().messages.stream(**message("tool", fresh_prompt(), tools=[WEATHER])) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "sunny"}
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": [called.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    last = client().messages.create(**message("tool", "", tools=[WEATHER]) | {"messages": messages})
    assert last.content[0].text == TOOL_TEXT


def test_tokens_are_counted_and_models_listed(client):
    counted = client().messages.count_tokens(model="ok", messages=[{"role": "user", "content": fresh_prompt()}])
    assert counted.input_tokens == 11
    assert [model.id for model in client().models.list()] == ["ok", "tool"]
    assert client().models.retrieve("ok").id == "ok"


def test_an_abort_in_mid_stream_reaches_the_provider_within_3_s(stage, client):
    prompt = fresh_prompt()
    stream = client().messages.create(**message("long", prompt), stream=True)
    for seen, _ in enumerate(stream):
        if seen == 5:
            break
    stream.close()
    until("the provider's connection closed", lambda: stage.calls(prompt)[0]["left"])
    if not DIRECT:
        assert stage.row(stream.response.headers["x-traygate-call"])["outcome"] == "client_left"


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, anthropic.BadRequestError), (401, anthropic.AuthenticationError), (404, anthropic.NotFoundError)],
)
def test_a_4xx_is_the_sdks_own_typed_error_tried_once(stage, client, status, error):
    prompt = fresh_prompt()
    with pytest.raises(error, match=f"scripted {status}"):
        client().messages.create(**message(f"status-{status}", prompt))
    assert len(stage.calls(prompt)) == 1


def test_the_sdks_own_retry_of_a_503_goes_through(stage, client):
    prompt = fresh_prompt()
    assert client().messages.create(**message("flaky-once", prompt)).content[0].text == TEXT
    assert len(stage.calls(prompt)) == 2


def test_an_open_breaker_refuses_with_a_typed_error_tried_once(stage, client):
    base_url = stage.breakable()["anthropic"]
    if not DIRECT:
        dying = client(base_url=base_url, max_retries=0)
        for _ in range(2):
            with pytest.raises(anthropic.InternalServerError):
                dying.messages.create(**message("status-503", fresh_prompt()))
    answers = []
    http = anthropic.DefaultHttpxClient(event_hooks={"response": [answers.append]})
    prompt = fresh_prompt()
    with pytest.raises(anthropic.APIStatusError, match="Traygate") as raised:
        client(base_url=base_url, http_client=http).messages.create(**message("refused" if DIRECT else "ok", prompt))
    assert raised.value.status_code == 503
    assert raised.value.body["error"]["code"] == "breaker_open"
    [answer] = answers
    assert answer.headers["x-should-retry"] == "false"
    assert len(stage.calls(prompt)) == (1 if DIRECT else 0)


@through_traygate
def test_a_spent_budget_refuses_with_a_typed_error_tried_once(stage, client):
    answers = []
    http = anthropic.DefaultHttpxClient(event_hooks={"response": [answers.append]})
    prompt = fresh_prompt()
    with pytest.raises(anthropic.APIStatusError, match="budget") as raised:
        client(http_client=http).messages.create(**message("too-dear", prompt))
    assert raised.value.status_code == 402
    assert raised.value.body["error"]["type"] == "billing_error"
    assert len(answers) == 1
    assert stage.calls(prompt) == []


def test_an_error_event_in_mid_stream_is_the_sdks_own_error(client):
    stream = client().messages.create(**message("error-event", fresh_prompt()), stream=True)
    with pytest.raises(anthropic.APIError, match=EVENT_ERROR):
        words(stream)


def test_a_stream_that_breaks_between_two_events_is_an_error_typed_by_traygate(client):
    stream = client().messages.create(**message("broken-stream", fresh_prompt()), stream=True)
    with pytest.raises((anthropic.APIError, *TRANSPORT_ERRORS) if DIRECT else anthropic.APIError):
        words(stream)


def test_a_stream_that_breaks_inside_an_event_is_an_error(client):
    stream = client().messages.create(**message("half-event", fresh_prompt()), stream=True)
    with pytest.raises((anthropic.APIError, *TRANSPORT_ERRORS)):
        words(stream)


def test_half_a_json_answer_is_an_error_never_an_answer(client):
    with pytest.raises((anthropic.APIConnectionError, *TRANSPORT_ERRORS)):
        client(max_retries=0).messages.create(**message("cut-json", fresh_prompt()))


@through_traygate
@pytest.mark.parametrize("stream", [False, True])
def test_twins_share_one_upstream_call(stage, client, stream):
    prompt = fresh_prompt()

    def ask(_):
        raw = client().messages.with_raw_response.create(**message("wait-400", prompt), stream=stream)
        answer = raw.parse()
        text = "".join(words(answer)) if stream else answer.content[0].text
        return text, raw.headers["x-traygate-dedup"]

    with ThreadPoolExecutor(2) as both:
        answers = list(both.map(ask, range(2)))
    assert [text for text, _ in answers] == [TEXT, TEXT]
    assert sorted(dedup for _, dedup in answers) == ["joined", "miss"]
    assert len(stage.calls(prompt)) == 1
