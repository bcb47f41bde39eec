"""LangChain for Python, on top of both SDKs."""

import os

os.environ["LANGSMITH_TRACING"] = "false"  # it would call home

import anthropic
import openai
import pytest
from conftest import DIRECT, TEXT, fresh_prompt, until
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

BAD_REQUEST = (openai.BadRequestError, anthropic.BadRequestError)
API_ERROR = (openai.APIError, anthropic.APIError)
REFUSED = (openai.InternalServerError, anthropic.InternalServerError)


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


@pytest.fixture(params=["openai", "anthropic"])
def chat(request, stage):
    def build(model, base_url=None, **more):
        if request.param == "openai":
            return ChatOpenAI(model=model, api_key="sk-lc", base_url=base_url or stage.openai, stream_usage=True, **more)
        return ChatAnthropic(model=model, api_key="sk-lc", base_url=base_url or stage.anthropic, **more)

    build.dialect = request.param
    return build


def test_asked_and_streamed(stage, chat):
    prompt = fresh_prompt()
    answer = chat("ok").invoke(prompt)
    assert answer.text == TEXT
    assert answer.usage_metadata["output_tokens"] == 7
    assert len(stage.calls(prompt)) == 1
    assert "".join(chunk.text for chunk in chat("ok").stream(fresh_prompt())) == TEXT


def test_a_tool_is_called(chat):
    [called] = chat("tool").bind_tools([weather]).invoke(fresh_prompt()).tool_calls
    assert (called["name"], called["args"]) == ("weather", {"city": "Paris"})


def test_twenty_at_once_are_twenty_calls(stage, chat):
    prompts = [fresh_prompt() for _ in range(20)]
    assert [answer.text for answer in chat("ok").batch(prompts)] == [TEXT] * 20
    assert [len(stage.calls(prompt)) for prompt in prompts] == [1] * 20


def test_a_4xx_and_a_broken_stream_are_errors(chat):
    with pytest.raises(BAD_REQUEST):
        chat("status-400").invoke(fresh_prompt())
    with pytest.raises(Exception if DIRECT else API_ERROR):
        list(chat("broken-stream", max_retries=0).stream(fresh_prompt()))


def test_an_open_breaker_is_tried_once(stage, chat):
    base_url = stage.breakable()[chat.dialect]
    if not DIRECT:
        for _ in range(2):
            with pytest.raises(REFUSED):
                chat("status-503", base_url, max_retries=0).invoke(fresh_prompt())
    prompt = fresh_prompt()
    with pytest.raises(REFUSED, match="Traygate"):
        chat("refused" if DIRECT else "ok", base_url, max_retries=5).invoke(prompt)
    assert len(stage.calls(prompt)) == (1 if DIRECT else 0)


def test_leaving_a_stream_reaches_the_provider_within_3_s(stage, chat):
    prompt = fresh_prompt()
    stream = chat("long").stream(prompt)
    for seen, _ in enumerate(stream):
        if seen == 5:
            break
    stream.close()
    until("the provider's connection closed", lambda: stage.calls(prompt)[0]["left"])


def test_embeddings(stage):
    # Token ids would need a vocabulary from the internet.
    embeddings = OpenAIEmbeddings(
        model="ok", api_key="sk-lc", base_url=stage.openai, check_embedding_ctx_length=False
    )
    assert embeddings.embed_query(fresh_prompt()) == [0.25, -0.5, 1.0]
