"""The documentation says what is there: its commands exist, its code runs, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flashbob_cupy import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/data/*.md"), *ROOT.glob("cuda/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found += commands(command, (*prefix, name)) if isinstance(command, click.Group) else [(*prefix, name)]
    return found


COMMANDS = commands(cli.main)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_is_in_the_readme_and_explains_itself(command):
    assert re.search(rf"^    flashbob {' '.join(command)}\b", README, flags=re.MULTILINE)
    result = CliRunner().invoke(cli.main, [*command, "--help"])
    assert result.exit_code == 0
    body = result.output.split("\n\n")[1].strip()
    assert body, "the command has no description"
    assert not body.startswith("Options")


def test_every_command_in_the_pages_exists():
    known = {*COMMANDS, *(command[:1] for command in COMMANDS)}
    for page in PAGES:
        for words in re.findall(
            r"(?:^ {4}|`)flashbob ([a-z]+(?: [a-z]+)?)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            first, *rest = words.split()
            assert (first,) in known, f"{page.name}: flashbob {words}"
            if isinstance(cli.main.commands[first], click.Group) and rest:
                assert (first, *rest) in known, f"{page.name}: flashbob {words}"


def test_two_commands_set_everything_up():
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 2
    check, test = lines
    for line in lines:
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e ")
    final = shlex.split(check.rpartition("&& ")[2])
    assert final[:3] == [".venv/bin/flashbob", "check", "--input"]
    assert (ROOT / final[3]).is_file()
    assert test.endswith("&& .venv/bin/pytest -q")


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "README.md" in script
    assert 'pip install -q -e ".[test]"' not in script, "CI must take the command from the README, not repeat it"


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_readme_runs(code):
    for framework in re.findall(r"^import (torch|jax)$", code, re.MULTILINE):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_readme_shows_python():
    assert blocks("python")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path):
    result = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_the_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:docs|tools|tests|examples|cuda|flashbob_cupy|\.ci)/[\w./-]*)", text)
    for name in named:
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_environment_variable_is_in_the_readme():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "flashbob_cupy").rglob("*.py"))
    found = set(re.findall(r"\bFLASHBOB_[A-Z_]+\b", sources))
    assert found
    assert {name for name in found if f"`{name}`" not in README} == set()
