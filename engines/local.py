"""Find who answers when it is not said: a server that is named or running, else our reader."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import BaseModel

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
"""The least window that Ollama gives a model unless it is told another one; it cuts longer prompts
without a word."""
MOST_BYTES = 1 << 20
"""Longest reply of it."""


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
    name, of_server = config.served_as, config.served_as or "the model"
    if config.endpoint:
        said = f"{of_server} at {', '.join(config.endpoint)} (--endpoint)"
        return Answerer(said, config.model, config.endpoint, name, keyed=True)
    if not config.model:
        if url := os.environ.get(BASE_URL, "").strip():
            said = f"{of_server} at {clean(url)} (no --endpoint; {BASE_URL})"
            return Answerer(said, endpoint=(url,), served_as=name, keyed=True)
        if found := _ollama(name):
            return found
    if config.served_as or config.chat:
        raise UserError(
            "--served-as and --chat are about a server, and none answers here: leave them out, or "
            "name one by --endpoint."
        )
    if config.model:
        return Answerer(f"{titled(config.model)} on this machine (--model)", config.model)
    missing = f"no --endpoint, no {BASE_URL}, no Ollama"
    return Answerer(f"{READER_TITLE} on this machine ({missing})", READER)


# ---------------------------------------------------------------- Ollama


class Card(BaseModel):
    """A model in the lists of Ollama, as its api/types.go has them."""

    name: str
    size: int = 0
    context_length: int = 0  # of a loaded one: its window
    remote_host: str = ""  # of one in a cloud
    remote_model: str = ""
    details: dict = {}

    @property
    def chats_here(self) -> bool:
        """Whether it writes, and does so here: one for embeddings does not, and a document is
        never sent to a cloud without a word."""
        kind = f"{self.name} {self.details.get('family')} {self.details.get('families')}"
        remote = self.remote_host or self.remote_model
        return not remote and not re.search("embed|bert", kind, re.IGNORECASE)


class Cards(BaseModel):
    models: list[Card] = []


class Shown(BaseModel):
    """What Ollama says of one model, loaded or not."""

    parameters: str = ""  # lines of a name and a value
    model_info: dict = {}


def _ollama(name: str) -> Answerer | None:
    """Return the chat model of a running Ollama: the one named, the first loaded, the largest."""
    url = _address(os.environ.get(HOST, ""))
    cards = [card for card in _read(Cards, f"{url}/api/tags").models if card.chats_here]
    if not cards:
        return None
    loaded = {card.name: card for card in _read(Cards, f"{url}/api/ps").models}
    why = "--served-as"
    if not name:
        name, why = next((c.name for c in loaded.values() if c.chats_here), ""), "loaded"
    if not name:
        name = max(cards, key=lambda card: card.size).name
        why = "its only chat model" if len(cards) == 1 else f"the largest of {len(cards)}"
    window = loaded[name].context_length if name in loaded else 0
    window = window or _window_to_be(_read(Shown, f"{url}/api/show", {"model": name}))
    host = urlsplit(url).hostname
    host = "this machine" if host in ("127.0.0.1", "localhost") else host
    said = f"{clean(name)} of the Ollama on {host} ({why}; no --endpoint, no {BASE_URL})"
    return Answerer(said, endpoint=(f"{url}/v1",), served_as=name, window=window)


def _window_to_be(shown: Shown) -> int:
    """Return the window that a model will have once it is loaded: its own, the environment's or
    the least, at most what it was trained for."""
    own = re.search(r"^num_ctx\s+(\d{1,9})$", shown.parameters, re.MULTILINE)
    asked = own[1] if own else os.environ.get(CONTEXT, "")
    window = int(asked) if re.fullmatch(r"[1-9]\d{0,8}", asked) else WINDOW
    trained = (n for key, n in shown.model_info.items() if key.endswith(".context_length"))
    return min(window, *(n for n in trained if type(n) is int and n > 0), window)


def _address(text: str) -> str:
    """Return the URL of an Ollama whose OLLAMA_HOST this is.

    >>> _address(""), _address("0.0.0.0:9"), _address("http://box"), _address("[::2]:1")
    ('http://127.0.0.1:11434', 'http://127.0.0.1:9', 'http://box:80', 'http://[::2]:1')
    """
    at, usual = (text.strip(), 80) if "://" in text else (f"//{text.strip()}", 11434)
    try:
        host, port = urlsplit(at).hostname, urlsplit(at).port
    except ValueError:
        host, port = None, None
    # what a server listens on is no address to ask
    host = "127.0.0.1" if host in (None, "", "0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port or usual}"


def _read(kind: type[Cards] | type[Shown], url: str, body: dict | None = None) -> Cards | Shown:
    """Read a reply of an Ollama; what is no running Ollama says nothing."""
    import httpx

    method, content = ("POST" if body else "GET"), b""
    timeout = httpx.Timeout(2.0, connect=0.3)  # it may not be running, and is on this machine
    try:
        with httpx.stream(method, url, json=body, timeout=timeout, trust_env=False) as reply:
            for part in reply.iter_bytes():
                if len(content := content + part) > MOST_BYTES:
                    return kind()
        return kind.model_validate_json(content)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return kind()
