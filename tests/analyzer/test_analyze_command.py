from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from stagetrace.errors import MissingExtraError, UsageError
from stagetrace.recorder import Recorder
from stagetrace.records import RecordKind
from stagetrace_analyzer.commands import analyze as command
from stagetrace_analyzer.conditions import CLASS_FIELDS, FieldType


@pytest.fixture
def data(two_classes, tmp_path: Path) -> str:
    return str(two_classes.write(tmp_path / "data"))


def test_text_goes_to_standard_output(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without options the text report is printed, and nothing else."""
    assert command.main([data]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("400 requests")
    assert "image/short" in out
    assert err == ""


def test_json_by_phase(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--json and --by-phase give the phases as JSON."""
    assert command.main([data, "--json", "--by-phase"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["phase"] for entry in document["classes"]] == ["text", "image", "mixture", "mixture"]


def test_a_spool_is_read(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool is made into a temporary dataset, which is gone afterwards; the spool stays as it is."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    recorder = Recorder(tmp_path / "spool")
    recorder.record_at(1_000_000, RecordKind.RECEIVED, 1)
    recorder.record_at(8_000_000, RecordKind.DISCONNECTED, 1)
    recorder.record_at(9_000_000, RecordKind.ENDED, 1, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "spool").iterdir()}
    assert command.main([str(tmp_path / "spool"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["outcomes"] for entry in document["classes"]] == [{"cancelled": 1}]
    assert document["ingest"]["records"] == 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "spool").iterdir()} == before
    assert not list(scratch.iterdir())


def test_several_datasets_and_own_classes(data: str, rows, tmp_path: Path, capsys) -> None:
    """All paths are analyzed as one, with the rules of the file."""
    for _ in range(2):
        rows.request()
    more = rows.write(tmp_path / "more")
    rules = tmp_path / "classes.toml"
    rules.write_text('[[class]]\nname = "all"\nwhere = {}')
    assert command.main([data, str(more), "--json", "--classes", str(rules)]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["classes"]
    assert (entry["class"], entry["requests"]) == ("all", 402)


def test_a_file_is_replaced_only_by_force(data: str, tmp_path: Path, capsys) -> None:
    """-o writes the report and prints nothing; an older file stays unless --force is given."""
    target = tmp_path / "report.txt"
    assert command.main([data, "-o", str(target)]) == 0
    assert target.read_text().startswith("400 requests")
    target.write_text("mine")
    with pytest.raises(UsageError, match=r"report\.txt exists") as caught:
        command.main([data, "-o", str(target)])
    assert "--force" in (caught.value.hint or "")
    assert target.read_text() == "mine"
    assert command.main([data, "--json", "-o", str(target), "--force"]) == 0
    assert json.loads(target.read_text())["requests"] == 400
    assert capsys.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "report.txt"]


def test_no_requests_is_not_enough_evidence(rows, tmp_path: Path, capsys) -> None:
    """Exit code 3 and one line on standard error; no report is written."""
    data = str(rows.write(tmp_path / "data"))
    assert command.main([data, "--json", "-o", str(tmp_path / "report")]) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"stagetrace: there are no requests in {data}\n")
    assert not (tmp_path / "report").exists()


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """-h shows an example with an existing option, in 80 columns."""
    with pytest.raises(SystemExit) as caught:
        command.main(["-h"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "stagetrace analyze run-1/ run-2/ --by-phase --json -o report.json" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_selection_is_analyzed(data: str, capsys) -> None:
    """Only requests that meet it are in the report, which says what was asked for and what was left out."""
    options = ["--class", "image/short", "--where", "phase=mixture", "--since", "1h"]
    assert command.main([data, "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(entry["class"], entry["requests"]) for entry in document["classes"]] == [("image/short", 100)]
    assert document["selection"] == {"class": ["image/short"], "where": ["phase=mixture"], "since": ["1h"]}
    assert (document["requests"], document["not_selected"]) == (100, 308)


def test_an_option_given_again(data: str, capsys) -> None:
    """Either class is taken, but all conditions must hold."""
    assert command.main([data, "--json", "--class", "image/short", "--class", "text/short"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 400
    assert command.main([data, "--json", "--where", "phase=text", "--where", "modality=image"]) == 3


def test_a_selection_that_leaves_nothing_says_what_there_was(data: str, capsys) -> None:
    """Exit code 3, and on standard error what could have been selected."""
    assert command.main([data, "--model", "gone", "-o", str(Path(data).parent / "report")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "stagetrace: none of 408 requests is selected\n"
        "in the data: 2001-09-09T01:46:40Z to 2001-09-09T01:46:41Z; "
        "classes text/short, image/short; no model; no arm; instance server\n"
    )
    assert not (Path(data).parent / "report").exists()


@pytest.mark.parametrize("ending", ["json", "md", "html", "txt"])
def test_the_ending_of_the_file_decides(data: str, tmp_path: Path, ending: str) -> None:
    """Without --format, -o report.html is HTML; what has no ending of a format is text."""
    target = tmp_path / f"report.{ending}"
    assert command.main([data, "-o", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    begins = {"json": "{", "md": "#", "html": "<!doctype html", "txt": "400 requests"}
    assert text.lower().startswith(begins[ending])
    assert "image/short" in text


def test_html_without_plotly_says_what_to_install(data: str, tmp_path: Path, monkeypatch) -> None:
    """It is one line, before anything is read; nothing is written."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("stagetrace_analyzer.reports.html")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtraError, match="an HTML report needs the package plotly") as caught:
        command.main([str(tmp_path / "missing"), "--html", "-o", str(tmp_path / "report")])
    assert caught.value.hint == "pip install 'stagetrace[html]'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--class", "image/shrt"], "no rule makes the class 'image/shrt'"),
        (["--since", "yesterday"], "--since: 'yesterday' is no time"),
        (["--since", "1h", "--until", "2h"], "--since 1h is not before --until 2h"),
        (["--since", "2999-01-01", "--until", "0s"], "--since 2999-01-01 is not before --until 0s"),
        (["--where", "pixel>1"], "--where: unknown field 'pixel'"),
        (["--model", ""], "--model is empty"),
        (["--json", "--html"], "--html: not allowed with argument --json"),
        (["--format", "xml"], "invalid choice: 'xml'"),
        (["--jason"], "unrecognized arguments: --jason"),
        (["--where"], "--where: expected one argument"),
    ],
)
def test_a_wrong_option_is_one_line_with_a_hint(data: str, options: list[str], message: str) -> None:
    """Each names the option and what is wrong, and says what to do; exit code 2."""
    with pytest.raises(UsageError, match=message) as caught:
        command.main([data, *options])
    assert caught.value.hint
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 2


def test_rules_may_ask_for_every_field(data: str, tmp_path: Path, capsys) -> None:
    """Each field works in a rule, and what is not known of the analysed requests is counted by field."""
    values = {FieldType.NUMBER: '">=0"', FieldType.TEXT: '"text"', FieldType.FLAG: "true"}
    where = "\n".join(f"{name} = {values[field.type]}" for name, field in CLASS_FIELDS.items())
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[class]]\nname = "all"\n[class.where]\n{where}\n')
    assert command.main([data, "--json", "--classes", str(rules)]) == 0
    document = json.loads(capsys.readouterr().out)
    unknown = {"pixels": 200, "media_bytes": 200} | dict.fromkeys(
        [
            "prompt_tokens",
            "label",
            "arm",
            "model",
            "stream",
            "cached_tokens",
            "output_tokens",
            "finish_reason",
        ],
        400,
    )
    assert document["unknown_facts"] == unknown
    assert [(entry["class"], entry["post"]) for entry in document["classes"]] == [("other", True)]
