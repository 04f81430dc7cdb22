"""The console script."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from stagetrace.cli import GROUP, main


def test_unknown_command_is_one_line(capsys):
    """A wrong command is one line with the commands there are, and exit code 2."""
    assert main(["nope"]) == 2
    assert (
        capsys.readouterr().err
        == "stagetrace: no command 'nope' (hint: commands are: analyze, dashboard, demo, doctor, export)\n"
    )


def test_help_names_every_command(capsys):
    """``-h`` names every command."""
    with pytest.raises(SystemExit) as stopped:
        main(["-h"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert all(command.name in said for command in entry_points(group=GROUP))


def test_missing_extra_is_one_line():
    """Without the extra's packages a command says what to install, and exits with 2."""
    code = (
        "import sys; sys.modules['duckdb'] = sys.modules['pyarrow'] = sys.modules['rich'] = None\n"
        "from stagetrace.cli import main; sys.exit(main(['analyze', '.']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("stagetrace: 'stagetrace analyze' needs the package ")
    assert done.stderr.endswith("(hint: pip install 'stagetrace[analyzer]')\n")


@pytest.mark.parametrize("command", sorted(command.name for command in entry_points(group=GROUP)))
def test_every_command_has_help_with_an_example(command, capsys):
    """Each command's help shows how to call it."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "-h"])
    assert stopped.value.code == 0
    assert f"stagetrace {command}" in capsys.readouterr().out
