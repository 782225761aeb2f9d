"""LangChain's ChatOpenAI and the openai client ask a server, which runs in the default environment:
`make test-real`."""

import os
import signal
import subprocess
from pathlib import Path

import openai
import pytest

pytest.importorskip("langchain_openai", reason="LangChain is not installed here: make test-real")
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

ROOT, KEY = Path(__file__).parents[2], "s3cret"
TEXT, QUESTION = "Anna joined Boris. Boris toured Oslo.", "Where is Anna?"
SERVE = [".venv/bin/python", "-u", "cli.py", "serve", "--model", "tiny", "--port", "0"]


@pytest.fixture(scope="module")
def url():
    environment = os.environ | {"MEMAGENT_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        SERVE, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    lines = iter(server.stdout.readline, "")
    yield next(word for line in lines for word in line.split() if word.endswith("/v1"))
    server.send_signal(signal.SIGINT)
    assert KEY not in server.communicate()[0] and server.returncode == 0


@pytest.fixture(scope="module")
def model(url):
    return openai.OpenAI(base_url=url, api_key=KEY).models.list().data[0].id


@pytest.mark.parametrize("messages", [
    [HumanMessage(TEXT), HumanMessage(QUESTION)], [SystemMessage(TEXT), HumanMessage(QUESTION)],
    [HumanMessage(f"{TEXT}\n\n{QUESTION}")],
    [HumanMessage(f"<context>\n{TEXT}\n</context>\n\nQuestion: {QUESTION}\nHelpful Answer:")],
])  # fmt: skip
def test_langchain_gets_the_answer_at_once_and_as_a_stream(url, model, messages):
    chat = ChatOpenAI(base_url=url, api_key=KEY, model=model, temperature=0)
    reply = chat.invoke(messages)
    assert reply.content == "Oslo" and reply.usage_metadata["total_tokens"] > 0
    chunks = [*chat.stream(messages)]
    assert "".join(chunk.content for chunk in chunks) == "Oslo"


def test_langchain_hears_why_it_gets_none(url, model):
    chat = ChatOpenAI(base_url=url, api_key=KEY, model=model, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="no text to read"):
        chat.invoke([HumanMessage("Hello!")])
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(base_url=url, api_key="other", model=model, max_retries=0).invoke("Hello!")
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([{"type": "function", "function": {"name": "f"}}]).invoke("Hello!")


def test_the_openai_client_streams_the_memory(url, model):
    client = openai.OpenAI(base_url=url, api_key=KEY)
    messages = [{"role": "user", "content": text} for text in (TEXT, QUESTION)]
    chunks = client.chat.completions.create(model=model, messages=messages, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    thoughts = [delta.get("reasoning_content") or "" for delta in deltas]
    assert "[section 1 of 1]" in "".join(thoughts)
    assert "".join(delta["content"] or "" for delta in deltas) == "Oslo"
