"""The captioner: a real multimodal server without vLLM, traced with a few lines of its own code."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scripted_cuda import ScriptedCuda

import stagetrace
from stagetrace import Horizon, Kind, Outcome, Stage, partition, read_spool
from stagetrace.recording import close_recorder
from stagetrace.testing import check_partition
from stagetrace_analyzer.demo.media import MediaServer, data_url, make_jpeg
from stagetrace_torch import timing
from stagetrace_torch.device import CudaTimer

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "examples" / "captioner"
PAGE = (ROOT / "docs" / "captioner.md").read_text(encoding="utf-8")
LINES_MAX = 40


def test_instrumentation_is_short():
    """The lines of the server that speak of tracing are fewer than forty."""
    server = [path for path in SERVER.glob("*.py") if path.name != "load.py"]
    lines = [line for path in server for line in path.read_text().splitlines()]
    words = r"stagetrace|\bStage\b|[tT]icket|timed_batch|\bcollect\b|\bitem\b|\b[cC]ontext\b|copy_context|_wait_for"
    traced = [line for line in lines if re.search(words, line)]
    assert 0 < len(traced) < LINES_MAX, "\n".join(traced)


def _blocks(language):
    """The code blocks of a language on the page about the captioner."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_lines_on_the_page_are_in_the_server():
    """Every line that the page shows as added, or beside one, stands in the file that it names."""
    shown = 0
    for block in _blocks("diff"):
        for line in block.splitlines():
            if line.startswith("--- "):
                lines = (SERVER / line.removeprefix("--- ")).read_text(encoding="utf-8").splitlines()
            else:
                assert line[1:] in lines, line
                shown += 1
    assert shown > 15


# --- on a device -----------------------------------------------------------------------------------


def test_nothing_is_left_unread(tmp_path, monkeypatch):
    """When a caption is written, all that a device did for it is known: no later call has to come."""
    torch = pytest.importorskip("torch")
    from captioner.models import VisionEncoder, Writer
    from captioner.workers import EncoderWorker, WriterWorker

    cuda = ScriptedCuda()
    cuda.reached = 1 << 30
    monkeypatch.setitem(timing._DEVICES, "cpu", timing._Device(CudaTimer(cuda)))
    encoder, writer = EncoderWorker(VisionEncoder(), batch=1), WriterWorker(Writer(), seats=1)

    async def serve():
        with stagetrace.request():
            ticket = stagetrace.wait(Stage.ENCODE, 0)
            picture = await encoder.encode(torch.zeros(3, 224, 224), ticket)
            encoded = [part.stage for part in _open_parts(tmp_path) if part.end is not None]
            letters = [letter async for letter in writer.write([picture], "a lamp", 3)]
        return encoded, letters

    close_recorder()
    stagetrace.start(tmp_path)
    try:
        encoded, letters = asyncio.run(serve())
    finally:
        close_recorder()
    assert encoded == [Stage.ENCODE_WAIT, Stage.ENCODE]
    assert len(letters) == 3
    (request,) = read_spool(tmp_path).requests
    done = [part.stage for part in request.parts if part.end is not None]
    assert len(done) == len(request.parts)
    assert Counter(done) == {
        Stage.ENCODE_WAIT: 1,
        Stage.ENCODE: 1,
        Stage.PREFILL_WAIT: 1,
        Stage.PREFILL: 1,
        Stage.DECODE_WAIT: 2,
        Stage.DECODE: 2,
    }


def _open_parts(folder):
    """The parts of the only request, which has not ended."""
    (request,) = read_spool(folder).open_requests
    return sorted(request.parts, key=lambda part: part.begin)


# --- under load ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(start_captioner):
    """A captioner that has had its load, text, one image, many images, and all of them."""
    from captioner.load import run

    with start_captioner() as server:
        ended = asyncio.run(run(server.url, seconds=5.5))
        assert all(set(outcomes) == {"ok"} for outcomes in ended.values()), ended
        for phase, outcomes in ended.items():
            asyncio.run(server.ended(phase, outcomes["ok"]))
        yield server


def test_every_request_is_partitioned_whole(loaded):
    """Every request of the load has both horizons, each covered exactly once, and nothing was set aside."""
    data = loaded.read()
    assert data.set_aside == {}
    assert [check for check in data.checks if not check.holds] == []
    for request in data.requests:
        parts = partition(request)
        check_partition(request, parts)
        assert request.outcome is Outcome.OK
        assert parts.ttft


def test_little_is_unattributed(loaded):
    """In each class, at p95, less than 5 % of either horizon is unattributed."""
    shares = defaultdict(list)
    for request in loaded.read().requests:
        parts = partition(request)
        for horizon in Horizon:
            spent = {interval.stage: 0 for interval in parts.of(horizon)}
            for interval in parts.of(horizon):
                spent[interval.stage] += interval.duration
            share = spent.get(Stage.UNATTRIBUTED, 0) / sum(spent.values())
            shares[request.facts["label"], horizon].append(share)
    assert {label for label, _ in shares} == {"text", "image", "images"}
    assert {
        place: np.quantile(found, 0.95) for place, found in shares.items() if np.quantile(found, 0.95) >= 0.05
    } == {}


def test_every_stage_of_the_server_is_seen(loaded):
    """The stages of requests with images are the ones that the server has, in the order in which it has them."""
    seen = defaultdict(set)
    for request in loaded.read().requests:
        stages = {interval.stage for interval in partition(request).completion}
        seen[request.facts["label"]] |= stages - {Stage.UNATTRIBUTED}
    text = {Stage.RECEIVE, Stage.PREFILL_WAIT, Stage.PREFILL, Stage.DECODE_WAIT, Stage.DECODE, Stage.RESPOND}
    loading = {Stage.RETRIEVAL, Stage.MEDIA_DECODE_WAIT, Stage.MEDIA_DECODE, Stage.ENCODE_WAIT, Stage.ENCODE}
    assert seen == {"text": text, "image": text | loading, "images": text | loading}


@pytest.fixture(scope="module")
def report(loaded):
    """What ``stagetrace analyze`` says of the load."""
    command = [sys.executable, "-m", "stagetrace", "analyze", str(loaded.spool), "--by-phase"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_report_says_which_wait_was_longest(report):
    """Of requests with images beside others, the report says that the longest wait was for the encoder."""
    answer = re.search(r"\[mixture\] image/short TTFT [^[]*", " ".join(report.split()))[0]
    assert "the longest wait was encode.wait" in answer, report


def _form(line):
    """A line of a report without its figures."""
    return re.sub(r"<?\d[\d,.]*", "#", " ".join(line.split()))


def test_excerpt_on_the_page_has_the_form_of_the_report(report):
    """Every line of the page's excerpt is one of the report but for the figures."""
    (excerpt,) = _blocks("text")
    forms = {_form(line) for line in report.splitlines()}
    assert [line for line in excerpt.splitlines() if _form(line) not in forms] == []


# --- answers ---------------------------------------------------------------------------------------


async def _ask(server, *, phase="", label="", status=200, **wanted):
    """Send a request; return the answer and how many milliseconds it took."""
    import httpx

    headers = {"baggage": f"stagetrace.phase={phase},stagetrace.label={label}"}
    async with httpx.AsyncClient(timeout=60) as client:
        began = time.monotonic()
        answer = await client.post(
            server.url + "/caption", json={"prompt": "a lamp"} | wanted, headers=headers
        )
        took_ms = (time.monotonic() - began) * 1e3
    assert answer.status_code == status, answer.text
    return answer, took_ms


def test_answers(captioner):
    """A caption has as many letters as were asked for, in one piece and as a stream, and the same ones."""
    whole, _ = asyncio.run(_ask(captioner, max_tokens=7))
    stream, _ = asyncio.run(_ask(captioner, max_tokens=7, stream=True))
    letters = re.findall(r'data: \{"text": "(.)"\}', stream.text)
    assert whole.json() == {"caption": "".join(letters)}
    assert len(letters) == 7
    assert stream.text.endswith("data: [DONE]\n\n")


def test_only_captions_are_requests(captioner):
    """Calls of other paths, a probe of the health or a scan, are answered and are no requests."""
    import httpx

    async def within():
        async with httpx.AsyncClient(base_url=captioner.url) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.get("/.env")).status_code == 404
        await _ask(captioner, phase="only captions")
        await captioner.ended("only captions", 1)

    asyncio.run(within())
    assert {request.facts["path"] for request in captioner.read().requests} == {"/caption"}


@pytest.mark.parametrize(
    ("fault", "image", "status"),
    [
        ("no picture", "data:image/jpeg;base64,aGVsbG8=", 422),
        ("no base64", "data:image/jpeg;base64,?", 422),
        ("no such scheme", "ftp://127.0.0.1/picture.jpg", 422),
        ("nobody there", "http://127.0.0.1:9/picture.jpg", 502),
    ],
)
def test_images_that_cannot_be_had(captioner, fault, image, status):
    """A bad image is the client's fault, an unreachable one is not; both are errors in the records."""
    asyncio.run(_ask(captioner, phase=fault, images=[image], status=status))
    (request,) = asyncio.run(captioner.ended(fault, 1))
    assert (request.outcome, request.facts["error_code"]) == (Outcome.ERROR, f"http_{status}")
    check_partition(request, partition(request))


# --- delays of known size --------------------------------------------------------------------------


def _play(server, phase, scene):
    """Play a scene between a warm-up and its end; the last request of each label, and how long each took."""

    async def within():
        with MediaServer() as media:
            # What is slow only once is in neither request.
            await _ask(server, phase=f"{phase} warm-up", images=[media.url(0, delay_ms=0)])
            took_ms = await scene(media)
        return took_ms, await server.ended(phase, len(took_ms))

    took_ms, requests = asyncio.run(within())
    return took_ms, {request.facts["label"]: request for request in requests}


def _added_ms(requests):
    """How many milliseconds longer the delayed request was in each stage, on the way to its first byte."""
    added = defaultdict(float)
    for label, sign in (("delayed", 1), ("undelayed", -1)):
        parts = partition(requests[label])
        check_partition(requests[label], parts)
        for interval in parts.ttft:
            added[interval.stage] += sign * interval.duration / 1e6
    return added


def _check_found(requests, stage, injected_ms):
    """The delay is in its stage, and not in any other wait."""
    added = _added_ms(requests)
    elsewhere = {each: ms for each, ms in added.items() if each.kind is Kind.WAIT and each is not stage}
    assert injected_ms >= 500, added
    assert 0.9 * injected_ms <= added[stage] <= 1.25 * injected_ms, (injected_ms, dict(added))
    assert max(elsewhere.values(), default=0) <= 0.05 * injected_ms, (injected_ms, dict(added))


def test_slow_media_server(captioner):
    """A media server that takes a second is a second of ``retrieval``."""
    phase = "slow media server"

    async def scene(media):
        took_ms = {}
        for seed, (label, delay_ms) in enumerate((("undelayed", 0), ("delayed", 1000))):
            images = [media.url(seed, delay_ms=delay_ms)]
            _, took_ms[label] = await _ask(captioner, phase=phase, label=label, images=images)
        return took_ms

    _, requests = _play(captioner, phase, scene)
    _check_found(requests, Stage.RETRIEVAL, 1000)


def _begun(phase, stage, count=1):
    """Whether somebody else has so many images that came to a stage and are in it."""

    def found(data):
        return any(
            request.facts.get("label") == "other"
            and request.facts.get("phase") == phase
            and sum(part.stage is stage and part.end is None for part in request.parts) >= count
            for request in data.open_requests
        )

    return found


def _play_behind(server, phase, stage, images, count=1):
    """Send a request behind somebody else's images, once so many of those are in a stage."""

    async def scene(media):
        took_ms = {}
        ask = {"phase": phase, "images": [media.url(1, delay_ms=0)]}
        _, took_ms["undelayed"] = await _ask(server, label="undelayed", **ask)
        other = asyncio.create_task(_ask(server, phase=phase, label="other", images=images, max_tokens=1))
        await server.until(_begun(phase, stage, count))
        _, took_ms["delayed"] = await _ask(server, label="delayed", **ask)
        _, took_ms["other"] = await other
        return took_ms

    took_ms, requests = _play(server, phase, scene)
    return requests, took_ms["delayed"] - took_ms["undelayed"]


def test_busy_decode_pool(captioner):
    """Behind somebody else's huge image a small one waits in ``media_decode.wait``."""
    noise = np.random.default_rng(1).integers(60, 190, (6000, 9000), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).convert("RGB").save(buffer, "JPEG", quality=75, progressive=True, subsampling=0)
    images = [data_url(buffer.getvalue())]
    found = _play_behind(captioner, "busy decode pool", Stage.MEDIA_DECODE, images)
    _check_found(found[0], Stage.MEDIA_DECODE_WAIT, found[1])


def test_busy_encoder(captioner):
    """Behind somebody else's many images one more waits in ``encode.wait``."""
    images = [data_url(make_jpeg(seed, (64, 64))) for seed in range(120)]
    # The last one to be decoded is in the queue of the encoder, and so is everybody before.
    found = _play_behind(captioner, "busy encoder", Stage.ENCODE_WAIT, images, count=60)
    _check_found(found[0], Stage.ENCODE_WAIT, found[1])
