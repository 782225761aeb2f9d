"""A page's `fetch` in a real Chromium asks the server, as far as --cors lets it: `make
test-browser`."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from chromium import BINARY, Chromium, Page
from served import NAME, PATH, chat, serving

from engines.scripted import ScriptedEngine

pytestmark = pytest.mark.skipif(not BINARY, reason="needs Chromium: apt-get install chromium")
ASK = """fetch({}, {{method: 'POST', headers: {}, body: JSON.stringify({})}})
    .then(reply => reply.text()).catch(error => 'refused: ' + error)"""


class Empty(BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *words):
        pass


@contextmanager
def page():
    """Serve a page; yields its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_a_page_that_was_named_reads_the_answer_and_no_other_page(codec, tmp_path, read_here, key):
    browser = Chromium(tmp_path)
    engine = ScriptedEngine(codec, lambda prompt: "Anna")
    with page() as named, page() as other, serving(engine, cors=(named,), key=key) as (http, chats):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

        def ask(origin, body, **fields):
            tab, url = Page(browser, origin), str(http.base_url.join(PATH))
            return tab.run(ASK.format(*map(json.dumps, (url, headers | fields, body))))

        assert json.loads(ask(named, chat()))["choices"][0]["message"]["content"] == "Anna"
        stream = ask(named, chat(stream=True))
        assert "reasoning_content" in stream and stream.endswith("data: [DONE]\n\n")
        assert ask(other, chat()).startswith("refused:")
        before = len(chats.lines)
        form = ask(other, chat(), **{"Content-Type": "text/plain"})  # which needs no consent
        assert form.startswith("refused:") and NAME not in form
        assert not any(" 200: " in line for line in chats.lines[before:])
    browser.close()
