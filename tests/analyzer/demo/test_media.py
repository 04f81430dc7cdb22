"""Seeded images and the server that hands them out."""

from __future__ import annotations

import base64
import io
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("PIL")

from PIL import Image

from stagetrace_analyzer.demo.media import MediaServer, data_url, make_jpeg


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  the test's own server
        return answer.read()


def test_equal_seeds_give_equal_bytes():
    """A seed is an image."""
    assert make_jpeg(7) == make_jpeg(7)
    assert make_jpeg(7) != make_jpeg(8)


@pytest.mark.parametrize("size", [(320, 240), (1, 1), (64, 500)])
def test_an_image_has_the_size_asked_for(size):
    """Width comes first."""
    image = Image.open(io.BytesIO(make_jpeg(1, size)))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", size)


def test_a_default_image_is_as_large_as_a_photograph_of_its_size():
    """Noise keeps the JPEG from shrinking to nothing."""
    assert 10_000 < len(make_jpeg(3)) < 60_000


def test_a_data_url_holds_the_bytes():
    """It is base64 behind the media type."""
    head, _, tail = data_url(b"\xff\xd8").partition(",")
    assert head == "data:image/jpeg;base64"
    assert base64.b64decode(tail) == b"\xff\xd8"


def test_the_server_hands_out_the_seeded_image_no_sooner_than_asked():
    """The delay is a floor."""
    with MediaServer() as media:
        begin = time.monotonic()
        assert fetch(media.url(5, delay_ms=150, size=(32, 16))) == make_jpeg(5, (32, 16))
        assert time.monotonic() - begin >= 0.15


@pytest.mark.parametrize(
    "query", ["delay_ms=-1", "delay_ms=soon", "delay_ms=60001", "width=5000", "height=²"]
)
def test_a_wrong_query_is_refused(query):
    """What the server cannot do is the asker's fault, and said so."""
    with MediaServer() as media, pytest.raises(urllib.error.HTTPError, match="400") as caught:
        fetch(media.url(5).partition("?")[0] + "?" + urllib.request.quote(query, safe="=&"))
    caught.value.close()


def test_stopping_does_not_wait_for_slow_fetches():
    """A fetch that is asleep is cut off, and the thread ends."""
    before = threading.active_count()
    failures = []

    def slow_fetch(url: str) -> None:
        try:
            fetch(url)
        except (urllib.error.URLError, ConnectionError) as error:
            failures.append(error)

    with MediaServer() as media:
        fetching = threading.Thread(target=slow_fetch, args=(media.url(5, delay_ms=30_000),))
        fetching.start()
        time.sleep(0.2)
        begin = time.monotonic()
    fetching.join(10)
    assert time.monotonic() - begin < 5
    assert len(failures) == 1
    assert threading.active_count() == before
