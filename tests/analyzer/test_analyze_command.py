from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from stagetrace.errors import DataError, UsageError
from stagetrace.recorder import Recorder
from stagetrace.records import RecordKind
from stagetrace_analyzer.commands import analyze as command


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


@pytest.mark.parametrize(
    ("output", "message"), [(".", "is a folder"), ("missing/report", "missing is no folder")]
)
def test_a_wrong_output_is_one_line(data: str, tmp_path: Path, output: str, message: str) -> None:
    """A folder, or a file in a folder that is not there, is a usage error, also with --force."""
    with pytest.raises(UsageError, match=message):
        command.main([data, "--force", "-o", str(tmp_path / output)])


def test_no_requests_is_not_enough_evidence(rows, tmp_path: Path, capsys) -> None:
    """Exit code 3 and one line on standard error; no report is written."""
    data = str(rows.write(tmp_path / "data"))
    assert command.main([data, "--json", "-o", str(tmp_path / "report")]) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"stagetrace: there are no requests in {data}\n")
    assert not (tmp_path / "report").exists()


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


def _partial(folder: Path) -> Path:
    (folder / "partial/requests").mkdir(parents=True)
    (folder / "partial/requests/part-0.parquet").write_bytes(b"PAR1")
    return folder / "partial"


def _looping(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_missing, UsageError, "missing does not exist"),
        (_file, UsageError, "file is a file"),
        (_empty, DataError, "empty is empty"),
        (_foreign, DataError, "photos holds neither a dataset nor a spool"),
        (_partial, DataError, "cannot read .*part-0.parquet"),
        (_looping, DataError, "cannot read .*loop: Too many levels"),
    ],
)
def test_a_wrong_path_is_one_line_with_a_hint(make, error: type[Exception], message: str, tmp_path) -> None:
    """Each wrong path names itself in one line, says what to do, and is exit code 2."""
    with pytest.raises(error, match=message) as caught:
        command.main([str(make(tmp_path))])
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_one_line(data: str, tmp_path: Path) -> None:
    """A folder without read permission is a DataError."""
    (tmp_path / "data").chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        command.main([data])


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """-h shows an example with an existing option, in 80 columns."""
    with pytest.raises(SystemExit) as caught:
        command.main(["-h"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "stagetrace analyze run-1/ run-2/ --by-phase --json -o report.json" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_folder_of_a_demo_is_pointed_to_its_dataset(data: str, tmp_path: Path) -> None:
    """A folder that holds a dataset deeper down is not read, but the way to it is told."""
    with pytest.raises(DataError, match="neither a dataset nor a spool") as caught:
        command.main([str(Path(data).parent)])
    assert caught.value.hint == f"there is a dataset in {data}"
