"""An HTTP server on loopback, whose requests a function answers."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """answer: of path, headers and content; returns status, reply and further headers, or None to
    end the connection without an answer."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, answer, port=0):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_): ...

            def do_GET(self):
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if found := answer(self.path, dict(self.headers), content):
                    with suppress(OSError):  # the other side may have gone
                        self.send(*found)
                else:
                    self.close_connection = True

            do_POST = do_GET

            def send(self, status, reply, headers=()):
                raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in [("Content-Length", str(len(raw))), *headers]:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
