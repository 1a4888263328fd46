"""The part of the Hub's protocol that ``huggingface_hub`` uses, on 127.0.0.1."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_letmein"


class Hub:
    """Repositories: ``name -> branch -> file -> bytes``."""

    def __init__(self):
        self.repos, self.private, self.broken, self.asked = {}, set(), set(), []

    def commit(self, files):
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def say(self, status, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        if "content_length" not in headers:
            headers["content_length"] = len(content)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status, code):
        self.say(status, {"error": code}, x_error_code=code, x_error_message=code)

    def found(self, repo, revision):
        """The files of a revision; None after a refusal."""
        hub = self.server.hub
        if repo not in hub.repos or (
            repo in hub.private and TOKEN not in self.headers.get("authorization", "")
        ):
            return self.refuse(401, "RepoNotFound")
        branches = hub.repos[repo]
        by_commit = {hub.commit(files): files for files in branches.values()}
        if revision not in branches and revision not in by_commit:
            return self.refuse(404, "RevisionNotFound")
        return branches.get(revision) or by_commit.get(revision) or {}

    def do_GET(self):
        hub = self.server.hub
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        hub.asked.append((self.command, *parts))
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
            files = self.found(repo, "/".join(rest[1:2]) or "main")
            if files is None:
                return None
            if rest[:1] == ["tree"]:
                return self.say(200, [
                    {"type": "file", "path": name, "size": len(content), "oid": "0"}
                    for name, content in files.items()
                ])  # fmt: skip
            siblings = [{"rfilename": name} for name in files]
            return self.say(200, {
                "id": repo, "sha": hub.commit(files), "siblings": siblings, "private": False,
                "_id": "0", "tags": [], "downloads": 0, "likes": 0, "modelId": repo,
            })  # fmt: skip
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        files = self.found(repo, revision)
        if files is None:
            return None
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        content = files[name]
        headers = {
            "etag": f'"{hashlib.sha1(content).hexdigest()}"', "x_repo_commit": hub.commit(files),
            "content_length": len(content), "accept_ranges": "bytes",
        }  # fmt: skip
        if name in hub.broken and self.command == "GET":
            self.close_connection = True
            content = content[: len(content) // 2]
        return self.say(200, content, **headers)

    do_HEAD = do_GET

    def do_POST(self):
        hub = self.server.hub
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
        hub.asked.append((self.command, *parts))
        if parts == ["api", "validate-yaml"]:  # of README.md
            return self.say(200, {"errors": [], "warnings": []})
        if parts == ["api", "repos", "create"]:
            said = json.loads(body)
            repo = "/".join(filter(None, [said.get("organization"), said["name"]]))
            if repo in hub.repos:
                return self.say(409, {"error": "exists", "url": f"http://127.0.0.1/{repo}"})
            hub.repos[repo] = {"main": {}}
            if said.get("private") or said.get("visibility") == "private":
                hub.private.add(repo)
            return self.say(200, {"url": f"http://127.0.0.1/{repo}", "name": repo})
        repo, kind, revision = "/".join(parts[2:4]), parts[4], parts[5]
        if self.found(repo, revision if kind != "branch" else "main") is None:
            return None
        branches = hub.repos[repo]
        if kind == "branch":
            branches.setdefault(revision, dict(branches["main"]))
            return self.say(201, {})
        if kind == "preupload":
            return self.say(200, {"files": [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]})  # fmt: skip
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                branches[revision][line["value"]["path"]] = content
        oid = hub.commit(branches[revision])
        return self.say(200, {
            "success": True, "commitOid": oid, "commitUrl": f"http://127.0.0.1/{repo}/commit/{oid}",
        })  # fmt: skip


@contextmanager
def hub():
    """Yields a `Hub` and its address while it answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
