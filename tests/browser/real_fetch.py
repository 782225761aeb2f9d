"""A page's `fetch` in a real Chromium asks the server, as far as --cors lets it: `make
test-browser`."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from chromium import BINARY, Chromium
from served import NAME, PATH, chat, serving

from engines.scripted import ScriptedEngine

pytestmark = pytest.mark.skipif(not BINARY, reason="needs Chromium: apt-get install chromium")
ASK = """fetch({url}, {{method: 'POST', headers: {headers}, body: JSON.stringify({body})}})
    .then(reply => reply.text()).catch(error => 'refused: ' + error)"""


@contextmanager
def page():
    """Serve an empty page; yields its origin."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_a_page_that_was_named_reads_the_answer_and_no_other_page(codec, tmp_path, read_here, key):
    browser = Chromium(tmp_path)
    engine = ScriptedEngine(codec, lambda prompt: "Anna")
    with page() as named, page() as other, serving(engine, cors=(named,), key=key) as (http, chats):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

        def ask(origin, body, **fields):
            tab = browser.open(origin)
            url = json.dumps(str(http.base_url.join(PATH)))
            ask = ASK.format(url=url, headers=json.dumps(headers | fields), body=json.dumps(body))
            found = tab.run(ask)
            tab.close()
            return found

        assert json.loads(ask(named, chat()))["choices"][0]["message"]["content"] == "Anna"
        stream = ask(named, chat(stream=True))
        assert "reasoning_content" in stream and stream.endswith("data: [DONE]\n\n")
        assert ask(other, chat()).startswith("refused:")
        before = len(chats.lines)
        form = ask(other, chat(), **{"Content-Type": "text/plain"})  # which needs no consent
        assert form.startswith("refused:") and NAME not in form
        assert not any(" 200: " in line for line in chats.lines[before:])
    browser.close()
