"""Every option that a remedy names is one of the installed vLLM, and so is every file that a source cites."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest

from stagetrace_analyzer.remedies import REMEDIES

needs.vllm()

NAMES = re.compile(r"--[a-z][a-z-]+|\bVLLM_[A-Z_]+")
OPTIONS = sorted({remedy.option for remedy in REMEDIES if remedy.option})
CITED = sorted(
    {source for remedy in REMEDIES for source in remedy.source.split("; ") if source.startswith("vllm/")}
)

ASK = """
import json, sys
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
flags = [flag for action in parser._actions for flag in action.option_strings]
default = vars(parser.parse_args([]))
changed = {}
for option in json.load(sys.stdin):
    try:
        parsed = vars(parser.parse_args(option.split()))
    except SystemExit:
        parsed = {}
    changed[option] = {name: repr(value) for name, value in parsed.items() if repr(value) != repr(default[name])}
json.dump({"names": flags + list(envs.environment_variables), "changed": changed}, sys.stdout)
"""


@pytest.fixture(scope="module")
def vllm_options():
    """What vLLM's own parser and settings say, asked once, in a process that it may change as it likes."""
    with_value = [option for option in OPTIONS if " " in option]
    asked = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(with_value),
        env=os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.key)
def test_options_exist(vllm_options, remedy):
    """Every option and variable of vLLM that a remedy names is in its parser or its settings."""
    named = NAMES.findall(f"{remedy.option or ''} {remedy.advice} {remedy.check}")
    assert set(named) <= set(vllm_options["names"])
    assert named or remedy.option is None


def test_made_up_options_do_not_exist(vllm_options):
    """The parser knows what it does not have."""
    assert not {"--no-such-option", "VLLM_NO_SUCH_SETTING"} & set(vllm_options["names"])


@pytest.mark.parametrize("option", [option for option in OPTIONS if " " in option])
def test_values_are_taken(vllm_options, option):
    """An option that is given with its value is accepted as it stands, and changes one setting, to that value."""
    (value,) = vllm_options["changed"][option].values()
    assert option.split()[-1].lower() in value.lower()


@pytest.mark.parametrize("source", CITED)
def test_cited_files_have_what_is_cited(source):
    """The file that a source cites is in the installed package, with the name in it."""
    (package,) = importlib.util.find_spec("vllm").submodule_search_locations
    path, _, name = source.partition(": ")
    assert name in (Path(package).parent / path).read_text(encoding="utf-8")
