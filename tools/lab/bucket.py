"""A bucket in a process of its own, as much of S3 as the Object tier asks for: ``python -m tools.lab.bucket PORT``.

Conditional writes, reads (also of ranges), deletes and lists; no parts, no second bucket. Objects are in memory and
gone with it. A request must be signed by the one access key, whose signature is not computed. Each request is a line of
its output.
"""

import hashlib
import os
import re
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape

from typing_extensions import Self

from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port

NAME = "bucket"
KEY_ID = "test"
ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
LISTENING = "listening"


class Objects:
    """Names and their bytes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._objects: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """An object's bytes."""
        with self._lock:
            return self._objects.get(name)

    def put(self, name: str, value: bytes, *, unless_there: bool, while_tag: str | None) -> bool:
        """Stores an object, unless a condition does not hold."""
        with self._lock:
            there = self._objects.get(name)
            if (unless_there and there is not None) or (while_tag and (there is None or tag(there) != while_tag)):
                return False
            self._objects[name] = value
            return True

    def delete(self, name: str) -> None:
        """Removes an object, if it is there."""
        with self._lock:
            self._objects.pop(name, None)

    def list(self, prefix: str) -> list[tuple[str, bytes]]:
        """What begins so, in the order of names."""
        with self._lock:
            return sorted((name, value) for name, value in self._objects.items() if name.startswith(prefix))


def tag(value: bytes) -> str:
    """What S3 calls an ETag."""
    return f'"{hashlib.md5(value, usedforsecurity=False).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    # An answer goes out whole: headers by themselves would wait for the other side's acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True
    objects = Objects()

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", self.date_time_string(0))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        asked = urllib.parse.parse_qs(query, keep_blank_values=True)
        bucket, _, name = urllib.parse.unquote(path).lstrip("/").partition("/")
        if f"Credential={KEY_ID}/" not in self.headers.get("Authorization", ""):
            self._refuse(403, "InvalidAccessKeyId")
        elif bucket != NAME:
            self._refuse(404, "NoSuchBucket")
        elif self.command == "GET" and "list-type" in asked:
            prefix, delimiter, after = (asked.get(name, [""])[0] for name in ("prefix", "delimiter", "start-after"))
            self._list(prefix, delimiter, after)
        elif self.command == "POST" and "delete" in asked:
            for found in re.findall("<Key>(.*?)</Key>", body.decode()):
                self.objects.delete(found)
            self._answer(200, b"<DeleteResult></DeleteResult>")
        elif asked:
            self._refuse(501, "NotImplemented")
        else:
            self._serve_object(name, body)

    def _serve_object(self, name: str, body: bytes) -> None:
        if self.command == "PUT":
            none, same = "If-None-Match" in self.headers, self.headers.get("If-Match")
            if self.objects.put(name, body, unless_there=none, while_tag=same):
                self._answer(200, ETag=tag(body))
            else:
                self._refuse(412, "PreconditionFailed")
        elif self.command == "DELETE":
            self.objects.delete(name)
            self._answer(204)
        elif (value := self.objects.get(name)) is None:
            self._refuse(404, "NoSuchKey")
        elif (range_ := self.headers.get("Range")) is not None and self.command == "GET":
            first, _, last = range_.removeprefix("bytes=").partition("-")
            piece = value[int(first) : int(last) + 1]
            if not piece:
                self._refuse(416, "InvalidRange")
                return
            place = f"bytes {first}-{int(first) + len(piece) - 1}/{len(value)}"
            self._answer(206, piece, ETag=tag(value), **{"Content-Range": place})
        else:
            self._answer(200, value, ETag=tag(value))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - the names of the base class

    def _list(self, prefix: str, delimiter: str, after: str) -> None:
        directories, contents = dict[str, None](), []
        for name, value in self.objects.list(prefix):
            if name <= after:
                continue
            directory, more, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if more:
                directories[f"{prefix}{directory}{delimiter}"] = None
            else:
                contents.append(
                    f"<Contents><Key>{escape(name)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
                    f"<Size>{len(value)}</Size><ETag>{escape(tag(value))}</ETag></Contents>"
                )
        common = [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in directories]
        self._answer(200, "".join(["<ListBucketResult>", *common, *contents, "</ListBucketResult>"]).encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """A line for each request: method, path, status."""
        # In one call: lines of requests that end together stay apart.
        os.write(1, (format % args + "\n").encode())


def write_credentials(path: Path, key_id: str, secret: str) -> None:
    """Writes a file with an access key."""
    path.write_text(f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {secret}\n")


def object_options(endpoint: str, credentials: Path) -> dict[str, Any]:
    """What a configuration says to use the bucket at an endpoint."""
    return {
        "object_url": f"s3://{NAME}/kv",
        "object_endpoint": endpoint,
        "object_credentials_file": str(credentials),
    }


class BucketServer(ThreadingHTTPServer):
    """As many connections as a depot opens at once may wait to be accepted; more than five are not rare."""

    daemon_threads = True
    request_queue_size = 128


class Bucket:
    """The bucket's process, seen from outside; it ends with the ``with`` block."""

    def __init__(self, home: Path) -> None:
        """Starts it; its log and the file with its access key are put into ``home``."""
        self.port = free_port()
        self.log = home / "bucket.log"
        self.credentials = home / "credentials"
        write_credentials(self.credentials, KEY_ID, "secret")
        command = [sys.executable, "-m", "tools.lab.bucket", str(self.port)]
        self._child = Child("the bucket", command, self.log, {"PYTHONPATH": str(ROOT)})
        self._child.wait_until_ready(lambda: LISTENING in self.log.read_text(), START_S)

    def options(self) -> dict[str, Any]:
        """What a configuration says to use it."""
        return object_options(f"http://{LOOPBACK}:{self.port}", self.credentials)

    def requests(self, method: str, part: str) -> int:
        """How many requests were served so far of that method and with that part in their path."""
        lines = self.log.read_text().splitlines()
        good = ('" 200', '" 206')
        return sum(
            line.startswith(f'"{method} ') and part in line and any(one in line for one in good) for line in lines
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()


def main() -> None:
    """Serves until it is killed."""
    server = BucketServer((LOOPBACK, int(sys.argv[1])), Handler)
    print(LISTENING, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
