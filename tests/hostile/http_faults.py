"""Hostile requests: bodies of a chat, and bytes on the wire. Every one is made when it is asked
for."""

import base64
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from tasks.chat_requests import Inquiry, read_request

TEXT, ASK = ({"role": "user", "content": text} for text in ("Anna joined Boris.", "Where is Anna?"))


def chat(*messages, model: str = "m", **fields) -> bytes:
    """A body with a question behind some messages."""
    return json.dumps({"model": model, "messages": [*(messages or [TEXT]), ASK]} | fields).encode()


def attached(content: bytes, name: str = "a.txt") -> dict:
    """A message with a file."""
    data = base64.b64encode(content).decode()
    part = {"type": "file", "file": {"filename": name, "file_data": data}}
    return {"role": "user", "content": [part]}


def repeated(before: str, item: str, n: int, after: str) -> bytes:
    return f"{before}{','.join([item] * n)}{after}".encode()


MESSAGES, PARTS = '{"model":"m","messages":[', '{"model":"m","messages":[{"role":"user","content":['
MESSAGE, PART = json.dumps(ASK), '{"type":"text","text":"a"}'

BODIES: dict[str, Callable[[], bytes]] = {
    "a number for each message": lambda: repeated(MESSAGES, "0", 3 << 17, "]}"),
    "a number for each part": lambda: repeated(PARTS, "0", 3 << 17, "]}]}"),
    "many messages": lambda: repeated(MESSAGES, MESSAGE, 2 * 10**5, "]}"),
    "many parts": lambda: repeated(PARTS, PART, 2 * 10**5, "]}]}"),
    "a number for each stop": lambda: chat(stop=[0] * 10**5),
    "many stops": lambda: chat(stop=["a"] * 10**5),
    "many tools": lambda: chat(tools=[{}] * 10**5),
    "many fields": lambda: chat(**{f"f{k}": 0 for k in range(10**5)}),
    "deep arrays": lambda: b"[" * 10**6,
    "deep objects": lambda: b'{"messages":' * 10**5,
    "deep in a field that is not heeded": lambda: b'{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
    "many digits": lambda: b'{"model":"m","seed":' + b"9" * 10**6 + b',"messages":[0]}',
    "a large exponent": lambda: b'{"model":"m","top_p":1e999999999999,"messages":[0]}',
    "no UTF-8": lambda: chat({"role": "user", "content": "@"}).replace(b"@", b"\xff\xfe\xc0\x80"),
    "lone surrogates": lambda: chat({"role": "user", "content": "\ud800" * 10**5}),
    "a surrogate as the model": lambda: chat(model="\udfff"),
    "zeros": lambda: bytes(10**6),
    "escapes": lambda: chat({"role": "user", "content": "\1" * 10**6}),
    "a long name of the model": lambda: chat(model="m" * 10**6),
    "a long type of part": lambda: chat({"role": "user", "content": [{"type": "t" * 10**6}]}),
    "a long question": lambda: chat({"role": "user", "content": "a"}).replace(
        b"Where is Anna?", b"a" * 10**6
    ),
    "base64 that is none": lambda: chat(attached(b"a" * 10**6)).replace(b"YWFh", b"?" * 4),
    "gzip in the file": lambda: chat(attached(gzip.compress(bytes(10**6)))),
    "a file name of paths": lambda: chat(attached(b"Anna", "../" * 10**5 + "etc/passwd")),
    "a file of zeros": lambda: chat(attached(bytes(10**6))),
    "a gzipped body": lambda: gzip.compress(chat()),
    "nothing": lambda: b"",
}

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

WIRES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a line without end": lambda: b"GET /" + b"a" * 10**6,
    "a header without end": lambda: HEAD + b"X: " + b"a" * 10**6,
    "no host": lambda: b"GET /health HTTP/1.1\r\n\r\n",
    "HTTP/1.0": lambda: b"GET /health HTTP/1.0\r\n\r\n",
    "a length that is none": lambda: HEAD + b"Content-Length: abc\r\n\r\n",
    "a large length": lambda: HEAD + b"Content-Length: 999999999999\r\n\r\n{}",
    "a length that is too small": lambda: HEAD + b"Content-Length: 5\r\n\r\n" + chat(),
    "a length and chunks": lambda: CHUNKED[:-2] + b"Content-Length: 2\r\n\r\n0\r\n\r\n",
    "no size of a chunk": lambda: CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a wrong size of a chunk": lambda: CHUNKED + b"2\r\n{}{}{}\r\n0\r\n\r\n",
    "no content type, and no size of a chunk": lambda: (
        CHUNKED.replace(b"application/json", b"text/plain") + b"zz\r\n"
    ),
    "tiny chunks": lambda: CHUNKED + b"1\r\n{\r\n" * 10**5 + b"0\r\n\r\n",
    "a gzipped body": lambda: (
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n" + b"\x1f\x8b\x08\0"
    ),
    "an expectation": lambda: HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    "pipelined": lambda: b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500,
    "a request behind another's": lambda: HEAD + b"Content-Length: 2\r\n\r\n{}GET / HTTP/9\r\n\r\n",
    "a path of zeros": lambda: b"GET /%00%0d%0a/../health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a path of other letters": lambda: b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long query": lambda: b"GET /health?" + b"a=b&" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
}


def sleepy(body: bytes) -> Inquiry:
    """Stand for a body that takes for ever, and write down which process it keeps busy."""
    if path := json.loads(body).get("sleeps"):
        Path(path).write_text(str(os.getpid()))
        time.sleep(10**6)
    return read_request(body)
