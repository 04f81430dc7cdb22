from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import sys
from pathlib import Path

import pytest

from stagetrace.errors import DataError, MissingExtraError, UsageError
from stagetrace.recorder import Recorder
from stagetrace.records import RecordKind
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.commands.options import (
    CommandParser,
    Format,
    Output,
    add_data_options,
    add_output_options,
    datasets_of,
    needs_extra,
    nothing_found,
    progress_bar,
    read_data_options,
    read_output,
)
from stagetrace_analyzer.dataset import is_dataset
from stagetrace_analyzer.selection import Selection


@pytest.fixture
def data(two_classes, tmp_path: Path) -> Path:
    return two_classes.write(tmp_path / "data")


def parsed(*argv: str) -> argparse.Namespace:
    parser = CommandParser(prog="stagetrace look")
    add_data_options(parser)
    add_output_options(parser)
    return parser.parse_args(argv)


def test_without_options_it_is_all_of_it() -> None:
    """Default classes, every request, all phases together, text to standard output."""
    options = parsed("a", "b")
    found = read_data_options(options)
    assert (found.paths, found.rules, found.by_phase) == ((Path("a"), Path("b")), load_rules(), False)
    assert found.selection == Selection()
    assert read_output(options) == Output(Format.TEXT, None)


def test_what_is_given_arrives() -> None:
    """Every option of the selection ends where it belongs."""
    found = read_data_options(
        parsed(
            "data", "--by-phase", "--since", "2h", "--until", "1h", "--class", "text/long", "--model", "m",
            "--arm", "a", "--arm", "b", "--instance", "i", "--where", "stream=true",
        )
    )  # fmt: skip
    assert found.by_phase
    assert found.selection.described() == {
        "since": ("2h",),
        "until": ("1h",),
        "class": ("text/long",),
        "model": ("m",),
        "arm": ("a", "b"),
        "instance": ("i",),
        "where": ("stream=true",),
    }


def test_classes_are_selected_by_the_rules_of_the_file(tmp_path: Path) -> None:
    """A class is unknown or not by the rules that are used."""
    rules = tmp_path / "my.toml"
    rules.write_text('[[class]]\nname = "mine"\nwhere = {}')
    assert (
        read_data_options(parsed("data", "--classes", str(rules), "--class", "mine")).rules.names[0] == "mine"
    )
    with pytest.raises(UsageError, match="no rule makes the class 'mine'"):
        read_data_options(parsed("data", "--class", "mine"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], Format.TEXT),
        (["--json"], Format.JSON),
        (["--html"], Format.HTML),
        (["--md"], Format.MD),
        (["--format", "md"], Format.MD),
        (["-o", "r.html"], Format.HTML),
        (["-o", "r.HTM"], Format.HTML),
        (["-o", "r.json"], Format.JSON),
        (["-o", "r.md"], Format.MD),
        (["-o", "r.txt"], Format.TEXT),
        (["-o", "html"], Format.TEXT),
        (["-o", "r.html", "--format", "text"], Format.TEXT),
        (["-o", "r.html", "--json"], Format.JSON),
    ],
)
def test_formats(argv: list[str], expected: Format, tmp_path: Path, monkeypatch) -> None:
    """An option decides, then the ending of the file, then it is text."""
    monkeypatch.chdir(tmp_path)
    assert read_output(parsed("data", *argv)).format is expected


@contextlib.contextmanager
def terminal():
    """Make standard output and standard error a terminal; yields what reads there until a text was shown."""
    other_end, end = os.openpty()

    def read(until: str) -> str:
        # A terminal hands over what was written in pieces, each a little later.
        shown = b""
        while until.encode() not in shown and select.select([other_end], [], [], 10)[0]:
            shown += os.read(other_end, 1 << 16)
        return shown.decode()

    with os.fdopen(end, "w", encoding="utf-8") as file, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        patched.setattr(sys, "stderr", file)
        patched.setenv("TERM", "xterm")
        yield read
    os.close(other_end)


def test_html_is_not_for_a_terminal(tmp_path: Path) -> None:
    """It goes to a file or a pipe."""
    with terminal():
        with pytest.raises(UsageError, match="HTML is not for a terminal") as caught:
            read_output(parsed("data", "--html"))
        assert caught.value.hint == "add -o report.html"
        assert read_output(parsed("data", "--html", "-o", str(tmp_path / "r"))).format is Format.HTML
        assert read_output(parsed("data", "--json")).format is Format.JSON
    assert read_output(parsed("data", "--html")).format is Format.HTML


def test_progress_is_shown_on_a_terminal() -> None:
    """A bar with what is done goes to standard error."""
    with terminal() as read:
        with progress_bar("analyzing") as progress:
            assert progress is not None
            progress(50, 200)
            progress(200, 200)
        shown = read(until="100%")
    assert "analyzing" in shown
    assert "100%" in shown


def test_progress_is_shown_nowhere_else(capsys) -> None:
    """A file or a pipe gets none."""
    with progress_bar("analyzing") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "is a folder"),
        ("missing/report", "missing is no folder"),
        ("x" * 300, "cannot write .*: File name too long"),
    ],
)
def test_a_wrong_output_is_one_line(tmp_path: Path, output: str, message: str) -> None:
    """What cannot be a file is a usage error before anything is computed, also with --force."""
    with pytest.raises(UsageError, match=message) as caught:
        read_output(parsed("data", "--force", "-o", str(tmp_path / output)))
    assert caught.value.hint


def test_an_output_that_fails_late_is_one_line(tmp_path: Path) -> None:
    """What shows only when it is written is a usage error, and leaves nothing behind."""
    with pytest.raises(UsageError, match=r"cannot write .*: embedded null byte"):
        Output(Format.TEXT, tmp_path / "a\0b").write("text")
    with pytest.raises(UsageError, match=r"cannot write .*: No such file or directory"):
        Output(Format.TEXT, tmp_path / "gone" / "report").write("text")
    with pytest.raises(UsageError, match=r"cannot write .*: No space left on device"):
        Output(Format.TEXT, Path("/dev/full")).write("text")
    assert not list(tmp_path.iterdir())


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """-o /dev/null and a pipe need no --force, and no file takes their place."""
    output = read_output(parsed("data", "--force", "-o", "/dev/null"))
    output.write("text")
    assert Path("/dev/null").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    read_output(parsed("data", "-o", str(pipe))).write("text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """--force replaces the file that a link leads to."""
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    read_output(parsed("data", "--force", "-o", str(tmp_path / "link"))).write("日本")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_text(encoding="utf-8") == "日本"


def test_a_terminal_that_lacks_a_character_gets_its_number(monkeypatch) -> None:
    """A name that the encoding of standard output does not have is no crash."""
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding="ascii", write_through=True))
    Output(Format.TEXT, None).write("class 日本")
    assert sink.getvalue() == b"class \\u65e5\\u672c"


def test_a_missing_package_says_what_to_install() -> None:
    """It is one line with the extra; a missing module of ours is a fault, and stays one."""
    with (
        pytest.raises(MissingExtraError, match="a chart needs the package no_such_package") as caught,
        needs_extra("html", "a chart"),
    ):
        import no_such_package.inside  # noqa: F401
    assert caught.value.hint == "pip install 'stagetrace[html]'"
    with (
        pytest.raises(ModuleNotFoundError, match=r"stagetrace_analyzer\.gone") as fault,
        needs_extra("html", "a chart"),
    ):
        import stagetrace_analyzer.gone  # noqa: F401
    assert not isinstance(fault.value, MissingExtraError)


def test_a_folder_that_is_named_twice_is_read_once(data: Path, tmp_path: Path) -> None:
    """A spool or a dataset under two names is not counted twice; temporary datasets are gone afterwards."""
    recorder = Recorder(tmp_path / "spool")
    recorder.record_at(1_000_000, RecordKind.RECEIVED, 1)
    (tmp_path / "again").symlink_to("spool")
    with datasets_of([tmp_path / "spool", data, tmp_path / "again", data / ".." / "data"]) as found:
        assert found[1:] == [data]
        assert is_dataset(found[0])
        assert found[0] != tmp_path / "spool"
    assert not found[0].exists()


def _missing(folder: Path) -> Path:
    return folder / "missing"


def _file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _foreign(folder: Path) -> Path:
    (folder / "photos").mkdir()
    (folder / "photos/cat.png").write_bytes(b"\x89PNG")
    return folder / "photos"


def _looping(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def _null(folder: Path) -> Path:
    return folder / "a\0b"


def _long(folder: Path) -> Path:
    return folder / ("x" * 300)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_missing, UsageError, "missing does not exist"),
        (_file, UsageError, "file is a file"),
        (_empty, DataError, "empty is empty"),
        (_foreign, DataError, "photos holds neither a dataset nor a spool"),
        (_looping, DataError, "cannot read .*loop: Too many levels"),
        (_null, UsageError, "is no path: embedded null byte"),
        (_long, DataError, "cannot read .*: File name too long"),
    ],
)
def test_a_wrong_path_is_one_line_with_a_hint(make, error: type[Exception], message: str, tmp_path) -> None:
    """Each wrong path names itself in one line, says what to do, and is exit code 2."""
    with pytest.raises(error, match=message) as caught, datasets_of([make(tmp_path)]):
        pass
    assert caught.value.hint
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_one_line(data: Path) -> None:
    """A folder without read permission is a DataError."""
    data.chmod(0)
    with pytest.raises(DataError, match="Permission denied"), datasets_of([data]):
        pass


def test_the_folder_of_a_demo_is_pointed_to_its_dataset(data: Path) -> None:
    """A folder that holds a dataset deeper down is not read, but the way to it is told."""
    with (
        pytest.raises(DataError, match="neither a dataset nor a spool") as caught,
        datasets_of([data.parent]),
    ):
        pass
    assert caught.value.hint == f"there is a dataset in {data}"


def test_what_there_was_to_select(rows, tmp_path: Path) -> None:
    """Times hold all requests, classes are in the order of the rules, long lists are cut, hostile names made harmless."""
    for number in range(8):
        rows.request(model=f"m{number}", arm="\x1b[31mred" if number else None, media_items=number % 2)
    data = rows.write(tmp_path / "data")
    said = nothing_found(read_data_options(parsed(str(data))), [data])
    assert said == (
        "none of 8 requests is selected\n"
        "in the data: 2001-09-09T01:46:40Z to 2001-09-09T01:46:41Z; classes text/short, image/short; "
        "models m0, m1, m2, m3, m4, m5 and 2 more; arm '\\x1b[31mred'; instance server"
    )
    begin, end = said.split("; ", maxsplit=1)[0].rpartition("data: ")[2].split(" to ")
    selection = read_data_options(parsed("data", "--since", begin, "--until", end)).selection
    assert selection.sql(0)[1] == {"selection_0": 10**18, "selection_1": 10**18 + 10**9}


def test_no_requests_at_all(rows, tmp_path: Path) -> None:
    """Then there was nothing to select from."""
    data = rows.write(tmp_path / "data")
    assert nothing_found(read_data_options(parsed(str(data))), [data]) == f"there are no requests in {data}"
