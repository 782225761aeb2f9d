"""Find who answers when it is not said: a server that is named or running, else our reader."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from config.errors import UserError, clean
from config.options import READER, READER_TITLE, AnsweringConfig
from config.realmodels import titled

BASE_URL = "OPENAI_BASE_URL"
"""Name of the environment variable with the URL of a server, as OpenAI's own clients read it."""
HOST = "OLLAMA_HOST"
"""Name of the environment variable with the address of Ollama, as Ollama's own client reads it."""
CONTEXT = "OLLAMA_CONTEXT_LENGTH"
"""Name of the environment variable with the window of models that Ollama loads."""
WINDOW = 4096
"""The window that Ollama gives a model unless it is told another one; it cuts longer prompts
without a word."""
TIMEOUT_S = 0.3
"""Longest wait for an Ollama that may be running: it is on this machine."""
MOST_BYTES = 1 << 20
"""Longest list of its models."""


@dataclass(frozen=True, slots=True)
class Answerer:
    """What answers: fields of AnsweringConfig, and who that is for a person."""

    said: str
    model: str = ""
    endpoint: tuple[str, ...] = ()
    served_as: str = ""
    window: int | None = None  # None: whatever the engine finds
    keyed: bool = False  # a server that the user named, which may have the API key


def answerer(config: AnsweringConfig) -> Answerer:
    """Return who answers: --endpoint, --model, OPENAI_BASE_URL, a running Ollama, our reader.

    UserError: a server's settings are given, and no server answers.
    """
    if config.endpoint:
        said = f"{config.served_as or 'the model'} at {', '.join(config.endpoint)} (--endpoint)"
        return Answerer(said, config.model, config.endpoint, config.served_as, keyed=True)
    if config.model:
        _check_no_server(config, "--model answers on this machine")
        aside = f"; --served-as names one of the server of {BASE_URL}" * (BASE_URL in os.environ)
        return Answerer(f"{titled(config.model)} on this machine (--model{aside})", config.model)
    if url := os.environ.get(BASE_URL, "").strip():
        said = f"{config.served_as or 'the model'} at {clean(url)} (no --endpoint; {BASE_URL})"
        return Answerer(said, endpoint=(url,), served_as=config.served_as, keyed=True)
    if found := _ollama(config.served_as):
        return found
    missing = f"no --endpoint, no {BASE_URL}, no Ollama"
    _check_no_server(config, f"there is none: {missing} with a chat model is running")
    return Answerer(f"{READER_TITLE} on this machine ({missing})", READER)


def _check_no_server(config: AnsweringConfig, why: str) -> None:
    """Raise a UserError for a setting that only a server could heed."""
    given = {"--served-as": config.served_as, "--chat": config.chat}
    if flag := next((name for name, value in given.items() if value), ""):
        raise UserError(
            f"{flag} is about a server, and {why}; leave it out, or name a server by --endpoint."
        )


# ---------------------------------------------------------------- Ollama


def _ollama(served_as: str) -> Answerer | None:
    """Return the chat model of a running Ollama: the one named, the first loaded, the largest."""
    url = _address(os.environ.get(HOST, ""))
    cards = [card for card in _get(f"{url}/api/tags") if _chats(card)]
    if not cards:
        return None
    loaded = {card["name"]: card for card in _get(f"{url}/api/ps")}
    names = [card["name"] for card in cards]
    name, why = served_as, "--served-as"
    if not name:
        name, why = next((name for name in loaded if name in names), ""), "loaded"
    if not name:
        name = max(cards, key=lambda card: _number(card.get("size")))["name"]
        why = "its only chat model" if len(names) == 1 else f"the largest of {len(names)}"
    window = _number(loaded.get(name, {}).get("context_length"))
    window = window or _number(os.environ.get(CONTEXT)) or WINDOW
    host = urlsplit(url).hostname
    host = "this machine" if host in ("127.0.0.1", "localhost") else host
    said = f"{clean(name)} of the Ollama on {host} ({why}; no --endpoint, no {BASE_URL})"
    return Answerer(said, endpoint=(f"{url}/v1",), served_as=name, window=window)


def _address(text: str) -> str:
    """Return the URL of an Ollama whose OLLAMA_HOST this is.

    >>> _address(""), _address("0.0.0.0:9"), _address("http://box"), _address("[::2]:1")
    ('http://127.0.0.1:11434', 'http://127.0.0.1:9', 'http://box:11434', 'http://[::2]:1')
    """
    try:
        parts = urlsplit(text.strip() if "://" in text else f"//{text.strip()}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    # what a server listens on is no address to ask
    host = "127.0.0.1" if host in (None, "", "0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port or 11434}"


def _get(url: str) -> list[dict]:
    """Return the models that a server lists; [] for whatever is no running Ollama."""
    import httpx

    content = b""
    try:
        with httpx.stream("GET", url, timeout=TIMEOUT_S, trust_env=False) as reply:
            for part in reply.iter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    return []
        models = json.loads(content)["models"]
        return [card for card in models if isinstance(card["name"], str)]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, RecursionError):
        return []


def _chats(card: dict) -> bool:
    """Tell whether a model writes, and does so here: not an embedding, not one in a cloud, to which
    a document would be sent without a word."""
    details = card.get("details") if isinstance(card.get("details"), dict) else {}
    families = " ".join(map(str, [details.get("family"), *(details.get("families") or ())]))
    remote = card.get("remote_host") or card.get("remote_model")
    return not remote and not re.search("embed|bert", f"{card['name']} {families}", re.I)


def _number(value: object) -> int:
    """Return a value as a whole number, 0 if it is none."""
    return int(value) if re.fullmatch(r"\d{1,15}", str(value)) else 0
