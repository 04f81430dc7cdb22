from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys

import pytest
from dashboarding import RECORDED

from stagetrace.cli import main

EVERYWHERE = "0.0.0.0"  # noqa: S104 - refused before it listens


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([str(RECORDED), "--host", EVERYWHERE], "lets other machines look, and there is no --token"),
        ([str(RECORDED), "--port", "70000"], "there is no port 70000"),
        ([str(RECORDED), "--host", "no such host", "--token", "t"], "cannot listen on no such host"),
        ([str(RECORDED.parent)], f"there is a dataset in {RECORDED}"),
        ([], "arguments are required: PATH"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    """Wrong paths, hosts and ports are told in a line with a hint, exit code 2."""
    assert main(["dashboard", *arguments]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert said in line
    assert "(hint: " in line


def test_it_serves_until_it_is_stopped():
    """It says where it is, answers there, and ends well when told to; the token is in no line."""
    arguments = ["dashboard", str(RECORDED), "--port", "0", "--token", "s3cret-of-a-test", "--follow"]
    command = [sys.executable, "-m", "stagetrace", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        try:
            while not lines or "open http" not in lines[-1]:
                lines.append(process.stderr.readline())
            address = re.search(r"http://([\d.:]+)/", lines[-1])[1]
            headers = {"Authorization": "Bearer s3cret-of-a-test"}
            connection = http.client.HTTPConnection(address, timeout=20)
            connection.request("GET", "/api/status", headers=headers)
            answer = connection.getresponse()
            assert json.load(answer)["span"]["requests"] > 0
            assert "Werkzeug" not in answer.headers["Server"]
            connection.close()
        finally:
            process.send_signal(signal.SIGTERM)
        lines += process.stderr.readlines()
        assert process.wait(20) == 0
    assert lines[-1] == "stagetrace: stopped\n"
    assert "s3cret" not in "".join(lines)
