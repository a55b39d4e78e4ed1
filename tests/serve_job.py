# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of its own, and code that deploys on it. See ``test_serve_llm``."""

import json
import sys
import urllib.error
import urllib.request
from typing import Any


def fetch(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=120).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"


def deploy(code: str) -> str:
    """Run the code; returns what Ray says of the deployments that failed."""
    from ray import serve

    try:
        exec(code, {})
    except RuntimeError:
        apps = serve.status().applications.values()
        deployments = [d for app in apps for d in app.deployments.values()]
        return "\n".join(d.message for d in deployments if "FAIL" in d.status)
    return ""


def main() -> None:
    import ray
    from ray import serve

    from tests.harness import ANSWERS

    job: dict[str, Any] = json.load(sys.stdin)
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=job["directory"],
    )
    serve.start(http_options={"host": "127.0.0.1", "port": job["port"]})
    answers = []
    for code in job["codes"]:
        error = deploy(code)
        fetched = []
        if not error:
            base = f"http://127.0.0.1:{job['port']}"
            fetched = [fetch(base + path, body) for path, body in job["requests"]]
        answers.append((error, fetched))
    print("\n" + ANSWERS + json.dumps(answers), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
