"""The model made on the spot."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from stagetrace.errors import MissingExtraError, UsageError
from stagetrace_analyzer.demo.model import DEMO, MARKER, TINY, WORDS, make_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def libraries():
    for name in ("torch", "tokenizers", "transformers"):
        pytest.importorskip(name)


@pytest.fixture(scope="module")
def tiny(libraries, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    # As a command: its libraries warn on import, and must not reach the terminal either way.
    made = subprocess.run(
        [sys.executable, "-m", "stagetrace_analyzer.demo.model", str(folder), "--preset", "tiny"],
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert (made.stdout, made.stderr) == (b"", b"")
    return folder


def test_the_model_is_what_its_dimensions_say(tiny):
    """The server reads the same configuration."""
    config = json.loads((tiny / "config.json").read_text())
    assert config["model_type"] == "idefics3"
    assert config["text_config"]["hidden_size"] == TINY.text_hidden
    assert config["vision_config"]["num_hidden_layers"] == TINY.vision_layers
    assert config["text_config"]["vocab_size"] > config["image_token_id"]
    processor = json.loads((tiny / "processor_config.json").read_text())
    assert processor["image_seq_len"] == TINY.tokens_per_tile == 16


def test_every_word_is_one_token_and_every_letter_too(tiny):
    """Prompts of twenty words are then of nearly one length; answers are plain letters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert {len(tokenizer.encode(" " + word).ids) for word in WORDS} == {1}
    assert {len(tokenizer.encode(letter).ids) for letter in "abcdefghij"} == {1}


def test_a_model_that_is_there_is_not_made_again(tiny):
    """The folder is only read."""
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    assert make_model(tiny, TINY) == tiny
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


def test_other_dimensions_replace_the_model(libraries, tmp_path):
    """Equal seeds give equal weights, another seed other ones."""
    weights = []
    for seed in (0, 1, 0):
        make_model(tmp_path / "model", dataclasses.replace(TINY, seed=seed))
        weights.append((tmp_path / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[2] != weights[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("marker", [None, "{"])
def test_somebody_elses_folder_is_left_alone(tmp_path, marker):
    """It is refused before anything heavy is imported."""
    (tmp_path / "thesis.txt").write_text("years of work")
    if marker:
        (tmp_path / MARKER).write_text(marker)
    with pytest.raises(UsageError, match="holds no model made here"):
        make_model(tmp_path, TINY)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_without_the_libraries_the_message_says_where_to_run(tmp_path, monkeypatch):
    """Nothing half-made is left."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"needs tokenizers.*that vLLM is installed in"):
        make_model(tmp_path / "model", TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"vision_hidden": 100},
        {"text_hidden": 64},
        {"scale_factor": 3},
        {"longest_edge": 385},
        {"longest_edge": 0},
    ],
)
def test_impossible_dimensions_are_refused(wrong):
    """Before a server refuses them at the first request."""
    with pytest.raises(UsageError):
        dataclasses.replace(DEMO, **wrong)
