"""`openai` for Python."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import DIRECT, EVENT_ERROR, TEXT, TOOL_TEXT, TRANSPORT_ERRORS, fresh_prompt, through_traygate, until

KEY = "sk-the-clients-own"
WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(stage):
    def build(**options):
        return openai.OpenAI(**{"api_key": KEY, "base_url": stage.openai, **options})

    return build


def asked(prompt):
    return [{"role": "user", "content": prompt}]


def words(stream):
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def test_a_chat_passes_both_ways_with_the_clients_own_key(stage, client):
    prompt = fresh_prompt()
    raw = client().chat.completions.with_raw_response.create(model="ok", messages=asked(prompt))
    answer = raw.parse()
    assert answer.choices[0].message.content == TEXT
    assert answer.usage.total_tokens == 18
    [call] = stage.calls(prompt)
    assert call["headers"]["authorization"] == f"Bearer {KEY}"
    if not DIRECT:
        assert raw.headers["x-traygate-dedup"] == "miss"
        assert stage.row(raw.headers["x-traygate-call"])["outcome"] == "completed"


def test_a_stream_comes_event_by_event(stage, client):
    prompt = fresh_prompt()
    chunks = list(client().chat.completions.create(model="ok", messages=asked(prompt), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    # Traygate has asked for it, and kept it to itself.
    assert [chunk for chunk in chunks if chunk.usage] == []
    if not DIRECT:
        [call] = stage.calls(prompt)
        assert json.loads(call["body"])["stream_options"] == {"include_usage": True}


def test_a_usage_chunk_that_was_asked_for_comes(client):
    stream = client().chat.completions.create(
        model="ok", messages=asked(fresh_prompt()), stream=True, stream_options={"include_usage": True}
    )
    assert list(stream)[-1].usage.completion_tokens == 7


def test_a_tool_is_called_streamed_and_not_and_answered(client):
    tools = [{"type": "function", "function": WEATHER}]
    prompt = fresh_prompt()
    message = client().chat.completions.create(model="tool", messages=asked(prompt), tools=tools).choices[0].message
    [called] = message.tool_calls
    assert called.function.name == "weather"
    assert json.loads(called.function.arguments) == {"city": "Paris"}

    with client().chat.completions.stream(model="tool", messages=asked(fresh_prompt()), tools=tools) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert json.loads(streamed.function.arguments) == {"city": "Paris"}

    result = {"role": "tool", "tool_call_id": called.id, "content": "sunny"}
    messages = [*asked(prompt), message.model_dump(exclude_none=True), result]
    answer = client().chat.completions.create(model="tool", messages=messages, tools=tools)
    assert answer.choices[0].message.content == TOOL_TEXT


def test_responses_whole_and_streamed(client):
    assert client().responses.create(model="ok", input=fresh_prompt()).output_text == TEXT
    events = list(client().responses.create(model="ok", input=fresh_prompt(), stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed"


def test_embeddings_and_models(client):
    answer = client().embeddings.create(model="ok", input=["a", fresh_prompt()])
    assert [one.embedding for one in answer.data] == [[0.25, -0.5, 1.0]] * 2
    assert [model.id for model in client().models.list()] == ["ok", "tool"]
    assert client().models.retrieve("ok").id == "ok"


def test_an_abort_in_mid_stream_reaches_the_provider_within_3_s(stage, client):
    prompt = fresh_prompt()
    stream = client().chat.completions.create(model="long", messages=asked(prompt), stream=True)
    for seen, _ in enumerate(stream):
        if seen == 5:
            break
    stream.close()
    until("the provider's connection closed", lambda: stage.calls(prompt)[0]["left"])
    if not DIRECT:
        assert stage.row(stream.response.headers["x-traygate-call"])["outcome"] == "client_left"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
    ],
)
def test_a_4xx_is_the_sdks_own_typed_error_tried_once(stage, client, status, error):
    prompt = fresh_prompt()
    with pytest.raises(error) as raised:
        client().chat.completions.create(model=f"status-{status}", messages=asked(prompt))
    assert raised.value.code == f"scripted_{status}"
    assert f"scripted {status}" in str(raised.value)
    assert len(stage.calls(prompt)) == 1


def test_the_sdks_own_retry_of_a_503_goes_through(stage, client):
    prompt = fresh_prompt()
    answer = client().chat.completions.create(model="flaky-once", messages=asked(prompt))
    assert answer.choices[0].message.content == TEXT
    assert len(stage.calls(prompt)) == 2


def test_an_open_breaker_refuses_with_a_typed_error_tried_once(stage, client):
    base_url = stage.breakable()["openai"]
    if not DIRECT:
        dying = client(base_url=base_url, max_retries=0)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                dying.chat.completions.create(model="status-503", messages=asked(fresh_prompt()))
    answers = []
    http = openai.DefaultHttpxClient(event_hooks={"response": [answers.append]})
    prompt = fresh_prompt()
    with pytest.raises(openai.InternalServerError) as raised:
        client(base_url=base_url, http_client=http).chat.completions.create(
            model="refused" if DIRECT else "ok", messages=asked(prompt)
        )
    assert raised.value.status_code == 503
    assert raised.value.code == "breaker_open"
    [answer] = answers
    assert answer.headers["x-should-retry"] == "false"
    assert int(answer.headers["retry-after"]) > 0
    assert len(stage.calls(prompt)) == (1 if DIRECT else 0)


@through_traygate
def test_a_spent_budget_refuses_with_a_typed_error_tried_once(stage, client):
    answers = []
    http = openai.DefaultHttpxClient(event_hooks={"response": [answers.append]})
    prompt = fresh_prompt()
    with pytest.raises(openai.APIStatusError, match="budget") as raised:
        client(http_client=http).chat.completions.create(model="too-dear", messages=asked(prompt))
    assert (raised.value.status_code, raised.value.code) == (402, "budget_exceeded")
    assert raised.value.body["budget"]["cap_nanos"] == 1_000
    assert len(answers) == 1
    assert stage.calls(prompt) == []


def test_an_error_event_in_mid_stream_is_the_sdks_own_error(client):
    stream = client().chat.completions.create(model="error-event", messages=asked(fresh_prompt()), stream=True)
    with pytest.raises(openai.APIError, match=EVENT_ERROR):
        words(stream)


def test_a_stream_that_breaks_between_two_events_is_an_error_typed_by_traygate(client):
    stream = client().chat.completions.create(model="broken-stream", messages=asked(fresh_prompt()), stream=True)
    with pytest.raises((openai.APIError, *TRANSPORT_ERRORS) if DIRECT else openai.APIError):
        words(stream)


def test_a_stream_that_breaks_inside_an_event_is_an_error(client):
    stream = client().chat.completions.create(model="half-event", messages=asked(fresh_prompt()), stream=True)
    with pytest.raises((openai.APIError, *TRANSPORT_ERRORS)):
        words(stream)


def test_half_a_json_answer_is_an_error_never_an_answer(client):
    with pytest.raises((openai.APIConnectionError, *TRANSPORT_ERRORS)):
        client(max_retries=0).chat.completions.create(model="cut-json", messages=asked(fresh_prompt()))


def test_a_stream_of_responses_that_fails_half_way_does_not_pass_for_whole(client):
    # An upstream's own error event, in the published form, comes as an event.
    events = list(client().responses.create(model="error-event", input=fresh_prompt(), stream=True))
    assert (events[-1].type, events[-1].message) == ("error", EVENT_ERROR)
    stream = client().responses.create(model="broken-stream", input=fresh_prompt(), stream=True)
    with pytest.raises((openai.APIError, *TRANSPORT_ERRORS) if DIRECT else openai.APIError):
        list(stream)


def test_a_compressed_answer_arrives_whole_and_streamed(client):
    whole = client().chat.completions.create(model="gzip", messages=asked(fresh_prompt()))
    assert whole.choices[0].message.content == TEXT
    assert "".join(words(client().chat.completions.create(model="gzip", messages=asked(fresh_prompt()), stream=True))) == TEXT


def test_the_async_client_asks_twenty_at_once_and_a_cancelled_task_leaves(stage):
    prompts = [fresh_prompt() for _ in range(20)]
    left = fresh_prompt()

    async def session():
        async with openai.AsyncOpenAI(api_key=KEY, base_url=stage.openai) as client:

            async def ask(prompt):
                answer = await client.chat.completions.create(model="ok", messages=asked(prompt))
                return answer.choices[0].message.content

            async def read(first_chunk):
                stream = await client.chat.completions.create(model="long", messages=asked(left), stream=True)
                async for _ in stream:
                    first_chunk.set()

            answers = await asyncio.gather(*map(ask, prompts))
            first_chunk = asyncio.Event()
            reading = asyncio.create_task(read(first_chunk))
            await first_chunk.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await asyncio.to_thread(until, "the provider's connection closed", lambda: stage.calls(left)[0]["left"])
            return answers

    assert asyncio.run(session()) == [TEXT] * 20
    assert [len(stage.calls(prompt)) for prompt in prompts] == [1] * 20


@through_traygate
@pytest.mark.parametrize("stream", [False, True])
def test_twins_share_one_upstream_call(stage, client, stream):
    prompt = fresh_prompt()

    def ask(_):
        raw = client().chat.completions.with_raw_response.create(
            model="wait-400", messages=asked(prompt), stream=stream
        )
        answer = raw.parse()
        text = "".join(words(answer)) if stream else answer.choices[0].message.content
        return text, raw.headers["x-traygate-dedup"]

    with ThreadPoolExecutor(2) as both:
        answers = list(both.map(ask, range(2)))
    assert [text for text, _ in answers] == [TEXT, TEXT]
    assert sorted(dedup for _, dedup in answers) == ["joined", "miss"]
    assert len(stage.calls(prompt)) == 1
