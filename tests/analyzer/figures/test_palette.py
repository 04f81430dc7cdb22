from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from stagetrace.stages import Kind, Stage
from stagetrace_analyzer.figures.palette import (
    DASHES,
    GROUNDS,
    KIND_PATTERNS,
    SERIES,
    STAGE_COLOURS,
    TEMPLATES,
    UNKNOWN_STAGE,
    Theme,
    series_colour,
    series_dash,
    stage_colour,
    stage_marker,
)

# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision
# Deficiency (2009), severity 1.0, on linear RGB.
VISIONS = {
    "trichromacy": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# Ottosson: A perceptual color space for image processing (2020).
LINEAR_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LMS_TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
NEIGHBOURS_APART = 0.095
"""Least OKLab distance of stages that meet in a stack; two colours are just told apart at about 0.02."""
ALL_APART = 0.05
"""Least OKLab distance of any two stages of different hue."""
AREA_CONTRAST = 2.0
"""Least contrast of a stage with the cards that figures stand on (WCAG's ratio); areas are large."""
LINE_CONTRAST = 2.9
"""Least contrast of a line of a class, which is thin."""


def linear(colour: str) -> np.ndarray:
    """Linear RGB of ``#rrggbb``."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def distance(one: str, other: str, vision: str) -> float:
    """OKLab distance of two colours as somebody with that vision sees them."""
    seen = [np.clip(VISIONS[vision] @ linear(colour), 0, 1) for colour in (one, other)]
    lab = [LMS_TO_OKLAB @ np.cbrt(LINEAR_TO_LMS @ rgb) for rgb in seen]
    return float(np.linalg.norm(lab[0] - lab[1]))


def hue(colour: str) -> float:
    """OKLab hue, degrees."""
    _, a, b = LMS_TO_OKLAB @ np.cbrt(LINEAR_TO_LMS @ linear(colour))
    return float(np.degrees(np.arctan2(b, a)))


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""
    lights = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def work_of(stage: Stage) -> Stage:
    """The work that a wait is for; any other stage itself."""
    return Stage(stage.value.removesuffix(".wait"))


SPLIT_ONLY = {stage for stage in Stage if "_transfer" in stage.value}
STACKS = {
    "split, image": list(Stage),
    "aggregated, image": [s for s in Stage if s not in SPLIT_ONLY],
    "aggregated, text": [
        s
        for s in Stage
        if s not in SPLIT_ONLY and work_of(s) not in {Stage.ENCODE, Stage.MEDIA_DECODE, Stage.RETRIEVAL}
    ],
    "work only": [s for s in Stage if s.kind is not Kind.WAIT and s not in SPLIT_ONLY],
}


def test_every_stage_has_a_colour() -> None:
    """The palette names exactly the model's stages, each colour once, and an unknown stage gets the fallback."""
    assert list(STAGE_COLOURS) == [stage.value for stage in Stage]
    assert len({*STAGE_COLOURS.values(), UNKNOWN_STAGE}) == len(Stage) + 1
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in STAGE_COLOURS.values())
    assert stage_colour("teleport") == UNKNOWN_STAGE


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("stack", STACKS)
def test_neighbours_in_a_stack_stay_apart(stack: str, vision: str) -> None:
    """Stages that lie side by side, with one left out or not, are told apart by everybody."""
    stages = STACKS[stack]
    for step in (1, 2):
        for one, other in zip(stages, stages[step:], strict=False):
            apart = distance(STAGE_COLOURS[one], STAGE_COLOURS[other], vision)
            assert apart >= NEIGHBOURS_APART, (one, other, apart)


@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_stages_stay_apart(vision: str) -> None:
    """Stages far from each other in a stack are told apart in the legend as well."""
    for one, other in itertools.combinations(Stage, 2):
        apart = distance(STAGE_COLOURS[one], STAGE_COLOURS[other], vision)
        assert apart >= ALL_APART, (one, other, apart)


def test_a_wait_has_the_hue_of_its_work() -> None:
    """A wait and what it waits for belong together: at most 8 degrees of hue apart."""
    for stage in Stage:
        turn = hue(STAGE_COLOURS[stage]) - hue(STAGE_COLOURS[work_of(stage)])
        assert abs((turn + 180) % 360 - 180) <= 8, stage


@pytest.mark.parametrize("theme", Theme)
def test_stages_and_series_stand_out_from_the_ground(theme: Theme) -> None:
    """Every colour has enough contrast with page and cards, and text has more."""
    ground = GROUNDS[theme]
    for colour in (*STAGE_COLOURS.values(), UNKNOWN_STAGE):
        assert contrast(colour, ground.surface) >= AREA_CONTRAST, colour
    for colour in SERIES:
        assert contrast(colour, ground.surface) >= LINE_CONTRAST, colour
    for ink in (ground.ink, ground.muted, ground.alarm):
        assert min(contrast(ink, ground.surface), contrast(ink, ground.page)) >= 4.5, ink


@pytest.mark.parametrize("vision", VISIONS)
def test_the_first_series_stay_apart(vision: str) -> None:
    """The first four traffic classes are far apart for everybody, and no two of the eight are alike."""
    for one, other in itertools.combinations(SERIES[:4], 2):
        assert distance(one, other, vision) >= 1.5 * NEIGHBOURS_APART, (one, other)
    for one, other in itertools.combinations(SERIES, 2):
        assert distance(one, other, vision) > 0.079, (one, other)


def test_more_series_than_colours_change_their_line() -> None:
    """No two of the first 32 traffic classes have both colour and line style in common."""
    looks = {(series_colour(position), series_dash(position)) for position in range(32)}
    assert len(looks) == len(SERIES) * len(DASHES) == 32


def test_kinds_have_patterns() -> None:
    """Waits are hatched, transfers dotted, everything else is plain."""
    assert dict(KIND_PATTERNS) == {"work": "", "wait": "/", "transfer": ".", "unattributed": ""}
    marker = stage_marker("encode.wait", Kind.WAIT)
    assert (marker["color"], marker["pattern"]["shape"]) == (STAGE_COLOURS["encode.wait"], "/")


def test_templates_are_transparent() -> None:
    """There is a template for each theme, and the page's ground shows through."""
    assert set(TEMPLATES) == set(GROUNDS) == set(Theme)
    for template in TEMPLATES.values():
        assert template.layout.paper_bgcolor == template.layout.plot_bgcolor == "rgba(0,0,0,0)"
