"""A server of streamed completions in place of an engine, started as ``python FILE PORT``.

Every request gets as many tokens as it asks for, in events of two, 10 ms apart. A request with
``cache_salt`` "refused" gets status 400, one with "broken" an error in the stream, and one with
"silent" no text. With ``exit`` as second argument the server ends at once."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVENT_S = 0.01


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        with contextlib.suppress(ConnectionError):  # clients may give up
            self.answer()

    def answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = body.get("cache_salt")
        self.send_response(400 if fault == "refused" else 200)
        self.end_headers()
        if fault == "refused":
            self.wfile.write(b"no such field")
            return
        if fault == "broken":
            self.event({"error": {"message": "out of memory"}})
            return
        for _ in range(0 if fault == "silent" else body["max_tokens"] // 2):
            self.event({"choices": [{"text": "ab"}]})
            time.sleep(EVENT_S)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if sys.argv[2:] == ["exit"]:
        sys.exit("no such model")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
