"""A tiny multimodal model, made on the spot with random weights.

The model is a real Idefics3 (a llama behind a vision transformer), so a server
treats it as any other multimodal model: larger images become more tiles, more
tokens and more encoding.  Its answers mean nothing; only its time does.

Run as ``python -m stagetrace_analyzer.demo.model FOLDER [--preset demo|tiny]``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagetrace.errors import MissingExtraError, StagetraceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MARKER: Final = "stagetrace-model.json"
"""Written into a model's folder last; says what the model was made from."""

_RECIPE: Final = 1
_HEAD_SIZE: Final = 64  # vLLM's CPU attention refuses smaller ones at the first request
_TILE_PIXELS: Final = 64
_PATCH_PIXELS: Final = 8
_PATCHES_PER_EDGE: Final = _TILE_PIXELS // _PATCH_PIXELS
_CONTEXT_TOKENS: Final = 4096
_VOCABULARY: Final = 1024  # more than the words need, so that each becomes one token
_START: Final = "<|im_start|>"
_END: Final = "<end_of_utterance>"
_IMAGE: Final = "<image>"
_MAX_GRID: Final = 6  # tiles per edge that the processor has names for

_WORD_LIST: Final = """
apple arrow basket bell bird boat bread bridge brick bucket cabin candle castle chair cloud coat coin
copper corn desk door dress drum eagle earth engine farm feather field finger fire fish flower forest
fox garden gate glass gold grape hammer harbour hill horse house island jacket kettle key kitchen
ladder lake lamp leaf letter lion market meadow milk mirror moon mountain needle night ocean orange
paper pencil piano pocket pond rabbit rain ribbon river road rope rose sail salt school shadow sheep
ship silver snow spoon spring star stone street sugar summer table thread tiger tower train tree
valley village violin wagon wall water wheel wind window winter wood wool yard
"""

WORDS: Final = tuple(_WORD_LIST.split())
"""Words that the tokenizer knows: each is one token behind a space."""

_CHAT_TEMPLATE: Final = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """What makes the model slow, and where.

    Attributes:
        vision_hidden: Width of the vision transformer; a multiple of 64.
        vision_intermediate: Width of its feed-forward layers.
        vision_layers: Number of its layers; the encoding time grows with it.
        text_hidden: Width of the language model; a multiple of 128.
        text_intermediate: Width of its feed-forward layers.
        text_layers: Number of its layers; prefill and decode time grow with it.
        scale_factor: Edge of the square of patches merged into a token (1, 2, 4 or 8);
            a tile of 64 x 64 pixels becomes ``(8 / scale_factor) ** 2`` tokens.
        longest_edge: Pixels an image's longer edge is scaled to before it is cut into
            tiles of 64 x 64; at most 384.
        seed: Seed of the random weights.

    Raises:
        UsageError: A value is outside its range.
    """

    vision_hidden: int
    vision_intermediate: int
    vision_layers: int
    text_hidden: int
    text_intermediate: int
    text_layers: int
    scale_factor: int = 2
    longest_edge: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vision_hidden % _HEAD_SIZE or self.text_hidden % (2 * _HEAD_SIZE):
            raise UsageError("vision_hidden must be a multiple of 64 and text_hidden one of 128")
        if self.scale_factor not in {1, 2, 4, 8}:
            raise UsageError(f"scale_factor must be 1, 2, 4 or 8, not {self.scale_factor}")
        if not 0 < self.longest_edge <= _MAX_GRID * _TILE_PIXELS:
            raise UsageError(f"longest_edge must be between 1 and 384, not {self.longest_edge}")

    @property
    def tokens_per_tile(self) -> int:
        """Number of embedding tokens of one 64 x 64 tile."""
        return (_PATCHES_PER_EDGE // self.scale_factor) ** 2


DEMO: Final = ModelDimensions(
    vision_hidden=384,
    vision_intermediate=1024,
    vision_layers=6,
    text_hidden=256,
    text_intermediate=768,
    text_layers=6,
)
"""14 million parameters: encoding a 320 x 240 image takes about five times its prefill."""

TINY: Final = ModelDimensions(
    vision_hidden=128,
    vision_intermediate=256,
    vision_layers=2,
    text_hidden=128,
    text_intermediate=256,
    text_layers=2,
)
"""Under a million parameters: for tests that only need a server that answers."""

PRESETS: Final = {"demo": DEMO, "tiny": TINY}


def make_model(folder: Path, dimensions: ModelDimensions = DEMO) -> Path:
    """Make the model in ``folder`` unless it is there already.

    The model appears in one piece: an interrupted call leaves no half-made folder.

    Args:
        folder: Where the model goes; a model made here from other dimensions is replaced.
        dimensions: What the model looks like.

    Returns:
        ``folder``.

    Raises:
        UsageError: ``folder`` holds something that was not made here.
        MissingExtraError: torch, transformers or tokenizers is not installed.
    """
    wanted = {"recipe": _RECIPE, **asdict(dimensions)}
    if _made_from(folder) == wanted:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".stagetrace-model-", dir=folder.parent) as scratch:
        fresh = Path(scratch, "model")
        with _quiet():
            _write_model(fresh, dimensions)
        (fresh / MARKER).write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    return folder


def _made_from(folder: Path) -> dict[str, int] | None:
    """Return what the model in ``folder`` was made from, or None where there is nothing."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        made_from: dict[str, int] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(
            f"{folder} is in use and holds no model made here",
            hint="name an empty or a new folder",
        ) from None
    return made_from


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and advice off the terminal; errors still raise."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _write_model(folder: Path, dimensions: ModelDimensions) -> None:
    try:
        import tokenizers  # noqa: F401, PLC0415
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            f"the demonstration's model needs {error.name}",
            hint="run this in the environment that vLLM is installed in",
        ) from error
    tokenizer = _tokenizer()
    processor = _processor(tokenizer, dimensions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(dimensions.seed)
        model = transformers.Idefics3ForConditionalGeneration(_config(tokenizer, dimensions))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tiles = [f"<row_{row}_col_{col}>" for row in range(1, 1 + _MAX_GRID) for col in range(1, 1 + _MAX_GRID)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[_START, "<fake_token_around_image>", _IMAGE, _END, "<global-img>", *tiles],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(("", *WORDS))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_START, eos_token=_END, pad_token=_END
    )


def _processor(tokenizer: Any, dimensions: ModelDimensions) -> Any:
    # The image processor on Pillow: the other one needs torchvision.
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor  # noqa: PLC0415

    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": dimensions.longest_edge},
        max_image_size={"longest_edge": _TILE_PIXELS},
    )
    return Idefics3Processor(
        image_processor,
        tokenizer,
        image_seq_len=dimensions.tokens_per_tile,
        chat_template=_CHAT_TEMPLATE,
    )


def _config(tokenizer: Any, dimensions: ModelDimensions) -> Any:
    from transformers import Idefics3Config  # noqa: PLC0415

    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Idefics3Config(
        text_config=_text_config(len(tokenizer), dimensions) | special,
        vision_config=_vision_config(dimensions),
        scale_factor=dimensions.scale_factor,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        **special,
    )


def _text_config(vocabulary: int, dimensions: ModelDimensions) -> dict[str, Any]:
    heads = dimensions.text_hidden // _HEAD_SIZE
    return {
        "model_type": "llama",
        "hidden_size": dimensions.text_hidden,
        "intermediate_size": dimensions.text_intermediate,
        "num_hidden_layers": dimensions.text_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": _CONTEXT_TOKENS,
        "vocab_size": vocabulary,
    }


def _vision_config(dimensions: ModelDimensions) -> dict[str, Any]:
    return {
        "hidden_size": dimensions.vision_hidden,
        "intermediate_size": dimensions.vision_intermediate,
        "num_hidden_layers": dimensions.vision_layers,
        "num_attention_heads": dimensions.vision_hidden // _HEAD_SIZE,
        "image_size": _TILE_PIXELS,
        "patch_size": _PATCH_PIXELS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Make a model from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="stagetrace_analyzer.demo.model", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo", help="how large it is")
    options = parser.parse_args(argv)
    try:
        make_model(options.folder, PRESETS[options.preset])
    except StagetraceError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
