"""A Hub on 127.0.0.1: the endpoints that publishing and loading speak, with switches for what can go wrong.

It keeps commits and large files in memory. The endpoints: model info, repo creation, preupload, LFS batch and upload,
commit, YAML validation, whoami, and resolve with the headers that huggingface_hub reads. The large-file backend that
is not spoken here (Xet) has to be off: `environment` turns it off.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"


class LoopbackHub(ThreadingHTTPServer):
    """A Hub in memory.

    Attributes:
        repos: The commits of each repo, oldest first: hash, message and files by name.
        large: What was uploaded through LFS, by its SHA-256.
        failing: The switches that are on, of:
            ``unauthorized`` answers 401 to everything; ``forbidden`` answers 403 to everything that writes;
            ``error`` answers 500 to everything that reads or commits;
            ``damaged`` sends a weights file with a flipped bit; ``dies_commit`` closes the connection before a commit
            is made.
        requests: The method and path of every request.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.large, self.failing, self.requests = {}, {}, set(), []
        self.private = set()  # the repos that were created as private ones
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home, **changes):
        """The environment of a client: this Hub alone, and a cache and a login of its own under `home`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "EQZOO"))}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            **changes,
        }

    def commit(self, repo, files, message="made by hand"):
        """Adds a commit with exactly these files."""
        commits = self.repos.setdefault(repo, [])
        sha = hashlib.sha1(f"{repo} {len(commits)} {message} {sorted(files.items())}".encode()).hexdigest()
        commits.append((sha, message, dict(files)))
        return sha

    def files(self, repo):
        """The files of the last commit."""
        return self.repos[repo][-1][2] if self.repos.get(repo) else {}

    def handle_error(self, request, client_address):
        """Connections that were closed on purpose are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.begin()
        if path is None:
            return
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(*found.groups())
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.info(found[1])
        elif path == "/api/whoami-v2":
            self.answer({"type": "user", "name": "someone", "orgs": []})
        else:
            self.missing("EntryNotFound")

    def do_POST(self):
        path = self.begin(writes=True)
        if path is None:
            return
        hub = self.server
        if path == "/api/repos/create":
            body = json.loads(self.body)
            repo = f"{body['organization']}/{body['name']}"
            if repo in hub.repos:
                self.answer({"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}, 409)
            else:
                hub.commit(repo, {".gitattributes": b""}, "initial commit")
                asked = body.get("private") or body.get("visibility") == "private"  # the key of older versions, and now
                (hub.private.add if asked else hub.private.discard)(repo)
                self.answer({"url": f"{hub.url}/{repo}", "id": repo, "name": repo})
        elif path == "/api/validate-yaml":
            errors = [{"message": '"license" must be one of apache-2.0, mit'}] if "bad_card" in hub.failing else []
            self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", path):
            names = [file["path"] for file in json.loads(self.body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            here = hub.files(found[1]) if found[1] in hub.repos else {}
            oids = {n: hub_hash(n, here[n]) if n in here else None for n in names}
            answers = [{"path": n, "uploadMode": modes[n], "shouldIgnore": False, "oid": oids[n]} for n in names]
            self.answer({"files": answers})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": o["oid"], "size": o["size"]}
                | ({} if o["oid"] in hub.large else {"actions": {"upload": {"href": f"{hub.url}/large/{o['oid']}"}}})
                for o in json.loads(self.body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", path):
            self.commit(found[1])
        else:
            self.missing("EntryNotFound")

    def do_PUT(self):
        path = self.begin(writes=True, open_to_all=True)
        if path is None:
            return
        oid = path.rpartition("/")[2]
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.answer({"error": "the hash is another"}, 400)
        self.server.large[oid] = self.body
        return self.answer({})

    def begin(self, writes=False, open_to_all=False):
        """Reads the whole request; returns its path, or None if it has been answered."""
        self.body = self.read_body()
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        failing = self.server.failing
        login = self.headers.get("Authorization")
        if "unauthorized" in failing or (writes and not open_to_all and login != f"Bearer {TOKEN}"):
            self.answer({"error": "Invalid username or password."}, 401)
        elif "forbidden" in failing and writes:
            self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        elif "error" in failing:
            self.answer({"error": "Internal Error"}, 500)
        else:
            return path
        return None

    def read_body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, content, status=200, headers=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in ({"Content-Length": len(data)} | (headers or {})).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code):
        self.answer({"error": code}, 404, {"X-Error-Code": code, "X-Error-Message": code})

    def info(self, repo):
        if repo not in self.server.repos:
            return self.missing("RepoNotFound")
        siblings = []
        for name, data in self.server.files(repo).items():
            blob = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if name.endswith(".safetensors"):
                sha = hashlib.sha256(data).hexdigest()
                blob["lfs"] = {"size": len(data), "sha256": sha, "pointerSize": 134}
            siblings.append(blob)
        commits = self.server.repos[repo]
        return self.answer({"id": repo, "sha": commits[-1][0] if commits else "0" * 40, "siblings": siblings})

    def resolve(self, repo, revision, name):
        commits = {sha: files for sha, _, files in self.server.repos.get(repo, ())}
        if not commits:
            return self.missing("RepoNotFound")
        sha = self.server.repos[repo][-1][0] if revision == "main" else revision
        if sha not in commits:
            return self.missing("RevisionNotFound")
        if name not in commits[sha]:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return None
        data = commits[sha][name]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{git_hash(data)}"'}
        if not name.endswith(".safetensors"):
            return self.answer(data, headers=headers)
        headers |= {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": len(data)}
        if "damaged" in self.server.failing:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self.answer(data, headers=headers)

    def commit(self, repo):
        if repo not in self.server.repos:
            return self.missing("RepoNotFound")
        if "dies_commit" in self.server.failing:
            self.close_connection = True
            return self.connection.close()
        files, message, lines = dict(self.server.files(repo)), "", self.body.decode().splitlines()
        for line in map(json.loads, lines):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                last = self.server.repos[repo][-1][0] if self.server.repos[repo] else None
                if value.get("parentCommit") not in (None, last):
                    return self.answer({"error": "A commit has happened since. Please refresh and try again."}, 412)
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.server.commit(repo, files, message)
        return self.answer({"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{repo}/commit/{sha}"})


def hub_hash(name, data):
    """The hash by which the Hub tells whether a file changed: SHA-256 of large files, else git's."""
    return hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else git_hash(data)


def git_hash(data):
    """The name under which git stores a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Client:
    """A Python process with an environment of its own, which runs code and keeps what it imported and named.

    It does not wait between retries, so that tests of servers that fail are quick.
    """

    _LOOP = """
import contextlib, io, json, sys, time
time.sleep = lambda seconds: None
answers, namespace = sys.stdout, {}
for line in sys.stdin:
    output, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            exec(json.loads(line), namespace)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps([output.getvalue(), error]), file=answers, flush=True)
"""

    def __init__(self, environment, cwd):
        command = [sys.executable, "-c", self._LOOP]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, code):
        """What the code printed, and what it raised or None, as ``Type: message``."""
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, code):
        """What the code printed; it must not raise."""
        output, error = self(code)
        assert error is None, error
        return output

    def close(self):
        self.process.kill()
        self.process.wait()
