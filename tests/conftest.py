import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COLUMNS"] = "80"  # what is printed doesn't depend on whose terminal runs the tests

import pytest
import torch

from tests.together import choose

torch.set_num_threads(1)
# A backward starts a thread for each device, after which no rank can be forked. Builds for CUDA see
# one among fake tensors, but the first backward of a process decides: this one sees none.
torch.ones((), requires_grad=True).backward()
ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", default=None, help="folder of golden .safetensors files")
    parser.addoption(
        "--update-docs", action="store_true", help="rewrite the printed figures of the chapters"
    )
    parser.addoption(
        "--part", default="0/1", metavar="K/N", help="of the tests of SAMPLED, the K-th of N parts"
    )


# Tests that take most of the suite's time. Continuous integration runs another sixth of them for
# each commit, and `make test` all.
SAMPLED = (
    "tests/checkpointing/",
    "tests/data/",
    "tests/docs/test_pictures.py",
    "tests/house/test_new_kind.py",
    "tests/interop/",
    "tests/memory/",
    "tests/model/",
    "tests/optim/",
    "tests/packs/",
    "tests/parallel/",
    "tests/run/",
    "tests/speed/",
    "tests/state/",
    "tests/test_bench_gpu.py",
    "tests/test_bench_plan.py",
    "tests/test_golden_bf16.py",
    "tests/test_plan_command.py",
    "tests/test_run.py",
    "tests/wiring/",
)


def of_part(tests: Iterable[str], part: str) -> set[str]:
    """Return the tests of a part K/N: every N-th case of each file of SAMPLED, all others.

    Tests of a file that have the same parameters mostly look at one run, so they are one case.
    """
    number, parts = map(int, part.split("/"))
    places: defaultdict[str, dict[str, int]] = defaultdict(dict)  # of cases, by file
    found = set()
    for test in tests:
        file, _, name = test.partition("::")
        known = places[file]
        place = known.setdefault(name.partition("[")[2] or name, len(known))
        if (
            not test.startswith(SAMPLED)
            or (place + zlib.crc32(file.encode()) - number) % parts == 0
        ):
            found.add(test)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = of_part((item.nodeid for item in items), config.getoption("--part"))
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in tests])
    items[:] = [i for i in items if i.nodeid in tests]


def pytest_collection_finish(session: pytest.Session) -> None:
    choose(session.items)


@pytest.fixture(scope="module", autouse=True)
def _young_heap() -> None:
    """Freeze live objects, so that no garbage collection traverses them again, here or in a fork.

    Importing torch's compiler alone leaves a million objects, a second for each `gc.collect()`.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep block traces in a cache of this test run, which its worker processes share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["MEGACPP_CACHE"] = str(shared / "cache")


@pytest.fixture(scope="session")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of sixty headers of the installed torch."""
    source = tmp_path_factory.mktemp("headers")
    folder = Path(torch.__file__).parent / "include/ATen/core"
    for header in sorted(folder.glob("*.h"))[:60]:
        shutil.copy(header, source)
    return source


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore signal handlers behind each test: reading a command line in it sets a run's."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def corpus(headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus of these headers, 400 ids."""
    out = tmp_path_factory.mktemp("data") / "corpus"
    command = ["data", "prepare", str(headers), "--out", str(out), "--vocab-size", "400"]
    done = subprocess.run(
        [sys.executable, "-m", "megacpp", *command, "--validation-fraction", "0.1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """Environment of a client of an S3 API, served by a process of its own."""
    if not all(importlib.util.find_spec(name) for name in ("moto", "flask", "s3fs")):
        pytest.skip("needs moto's server and s3fs")
    serve = (
        "from moto.server import ThreadedMotoServer as Server; server = Server(port=0);"
        "server.start(); print('at', *server.get_host_and_port(), flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", serve],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    host, port = next(line for line in process.stdout if line.startswith("at ")).split()[1:]
    names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"
    yield {
        **dict.fromkeys(names, "us-east-1"),
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "NO_PROXY": "*",
    }
    process.communicate("\n")


def make_bucket(name: str, s3: Mapping[str, str]) -> Any:
    """Return boto3's client of the S3 API, after it has made a bucket."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    client.create_bucket(Bucket=name)
    return client
