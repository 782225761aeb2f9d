"""Checkpoints are whole or not there, and run nothing that lies in them."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from config.errors import UserError
from config.options import RunConfig
from models import checkpoints
from models.checkpoints import base_fingerprints, best_step, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected")
STATE = {"base": {}, "dtype": "float32", "position": 7, "done_steps": 1}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def trained(seed=0):
    """Return a model of two matrices and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def values(model, optimizer):
    """Return every weight, moment and setting of a training."""
    return pickle.dumps([
        [p.detach().tolist() for p in model.parameters()],
        [[(k, v.tolist()) for k, v in state.items()] for state in optimizer.state.values()],
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    ])  # fmt: skip


def contents(model, optimizer):
    moments = checkpoints.get_optimizer_state_dict(model, optimizer, options=checkpoints._OPTIONS)
    return {"weights": dict(model.named_parameters()), "optimizer": moments}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The checkpoint of a run in the present folder."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    save_checkpoint(Path("run/checkpoints/step-1"), *trained(), STATE)
    return Path("run/checkpoints/step-1")


def test_what_is_saved_is_loaded(path):
    ours, theirs = trained(), trained(seed=1)
    assert values(*theirs) != values(*ours)
    assert load_checkpoint(path, *theirs) == STATE
    assert values(*theirs) == values(*ours)
    other = trained(seed=1)[0]
    load_checkpoint(path, other)  # for an export, without an optimizer
    assert all(map(torch.equal, other.parameters(), ours[0].parameters()))
    assert {file.name for file in path.parent.iterdir()} == {"step-1"}
    with pytest.raises(UserError):
        load_checkpoint(path, torch.nn.Sequential(torch.nn.Linear(4, 6)))


@pytest.mark.parametrize(
    ("rows", "best"),
    [([], None), ([(1, 0.5)], 1), ([(1, 0.5), (3, 0.5)], 3), ([(1, 0.5), (2, 0.9)], 1),
     ([(1, 0.5), (3, float("nan"))], 1), ([(3, float("nan"))], None)],
)  # fmt: skip
def test_the_best_is_the_last_of_equals_that_is_there(tmp_path, rows, best):
    for name in ("step-1", "step-3", "step-3-copy", ".step-2.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    rows = [{"step": step, "score": score, "n": 4} for step, score in rows]
    checkpoints.write_validations(tmp_path / "validation.csv", rows)
    assert str(checkpoints.validations(tmp_path)) == str(rows)
    assert best_step(tmp_path) == best and checkpoints.newest(tmp_path) == 3
    assert checkpoints.newest(tmp_path / "none") == 0


# ---------------------------------------------------------------- what would run

RAN = "__import__('pathlib').Path('ran').touch()"


def calling(module: str, name: str, argument: str) -> bytes:
    """Return a pickle that calls a function with a text."""
    texts = (b"X" + len(x).to_bytes(4, "little") + x.encode() for x in (module, name, argument))
    return b"\x80\x04%b%b\x93%b\x85R." % tuple(texts)


WAYS = ("torch", "torch.serialization", "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.metadata")  # fmt: skip


@pytest.mark.parametrize(("module", "name", "argument"), [
    ("os", "system", "touch ran"), ("posix", "system", "touch ran"), ("pathlib", "Path", "ran"),
    ("subprocess", "getoutput", "touch ran"), ("builtins", "getattr", "ran"),
    ("builtins", "eval", RAN), ("builtins", "exec", RAN),
    ("torch", "load", "run/checkpoints/step-1/.metadata"),
    *((module, "os.system", "touch ran") for module in WAYS),  # by way of one that is named
])  # fmt: skip
def test_metadata_call_nothing(path, module, name, argument):
    (path / ".metadata").write_bytes(calling(module, name, argument))
    with pytest.raises(UserError, match=f"{module}.{name} is no part of"):
        load_checkpoint(path, *trained())
    assert not Path("ran").exists()


class Evil:
    def __reduce__(self):
        return eval, (RAN,)


def test_values_and_tensors_call_nothing(path, monkeypatch):
    """Neither a setting of the optimizer nor what stands in a tensor's place in the shards."""
    model, optimizer = trained()
    saved = contents(model, optimizer)
    saved["optimizer"]["param_groups"][0]["lr"] = Evil()
    dcp.save(saved, checkpoint_id=path)
    with pytest.raises(UserError):
        load_checkpoint(path, model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__reduce_ex__", lambda *_: (eval, (RAN,)))
        dcp.save({"weights": saved["weights"]}, checkpoint_id=path)
    Path("ran").unlink(missing_ok=True)
    with pytest.raises(UserError):
        load_checkpoint(path, model)
    assert not Path("ran").exists()


@pytest.mark.parametrize("other", ["../step-2/__0_0.distcp", "{there}/__0_0.distcp"])
def test_a_checkpoint_reads_no_file_elsewhere(path, other):
    (path.parent / "step-2").mkdir()
    (path / "__0_0.distcp").rename(path.parent / "step-2/__0_0.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for part in metadata.storage_data.values():
        part.relative_path = other.format(there=(path.parent / "step-2").absolute())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError):
        load_checkpoint(path, *trained())


# ---------------------------------------------------------------- what is not whole


def full(*_, **__):
    raise OSError("No space left on device")


def test_what_cannot_be_written_gets_no_name_and_leaves_the_one_before(path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(checkpoints, "sync", full)
        save_checkpoint(path.with_name("step-2"), *trained(), STATE | {"done_steps": 2})
    assert {file.name for file in path.parent.iterdir()} == {"step-1"}
    theirs = trained(seed=1)
    load_checkpoint(path, *theirs)
    assert values(*theirs) == values(*trained())


def test_no_checkpoint_makes_the_folder_of_a_run_that_is_gone(tmp_path):
    with pytest.raises(OSError):
        save_checkpoint(tmp_path / "gone/checkpoints/step-2", *trained(), STATE)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("other", [None, 3])
@pytest.mark.parametrize("damage", [
    lambda path: (path / "state.json").write_text("[]"),
    lambda path: (path / "state.json").unlink(),
    lambda path: (path / "state.json").write_text(json.dumps(STATE)[:9]),
    lambda path: os.truncate(path / "__0_0.distcp", 1000),
    lambda path: (path / "__0_0.distcp").unlink(),
    lambda path: (path / ".metadata").unlink(),
])  # fmt: skip
def test_a_damaged_one_is_a_sentence_that_names_what_there_is_beside_it(path, damage, other):
    if other:
        path.with_name(f"step-{other}").mkdir()
    damage(path)
    with pytest.raises(UserError, match=f"step {other}" if other else "--name"):
        load_checkpoint(path, *trained())


# ---------------------------------------------------------------- the base


def test_only_what_a_training_needs_has_a_fingerprint_which_is_that_of_its_weights(tmp_path):
    base, adapter = (tmp_path / name for name in ("base", "adapter"))
    for folder, name in ((base, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir()
        (folder / name).write_text(json.dumps({"base_model_name_or_path": str(base)} | LORA))
        save_file({"x": torch.ones(2)}, folder / f"{folder.name}.safetensors")
    run = RunConfig(model=str(base), adapter=str(adapter))
    names = [{*base_fingerprints(run, *needs)} for needs in ((0, 0), (4, 0), (0, 0.1), (4, 0.1))]
    assert names == [set(), {str(base)}, *[{str(base), str(adapter)}] * 2]
    before = base_fingerprints(run, True, True)
    (base / "tokenizer.json").touch()
    assert base_fingerprints(run, True, True) == before
    save_file({"x": torch.zeros(2)}, base / "base.safetensors")
    after = base_fingerprints(run, True, True)
    assert all(before[name] != after[name] for name in before)  # adapters are those of this base
    embedded = base_fingerprints(RunConfig(), True)
    assert [*embedded] == ["the embedded policy"]
    assert embedded == base_fingerprints(RunConfig(model="tiny"), True)


@pytest.mark.parametrize(("saved", "now", "named"), [
    ({"a": "1"}, {"a": "1"}, ""), ({"a": "1"}, {"a": "2"}, "a"), ({}, {"a": "2"}, ""),
    ({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, "b"),
    ([0.01, 0.02], {"a": "2"}, ""), ({"a": "0f" * 32}, {"a": "2"}, ""),  # of earlier versions
    ({"a": "1"}, {}, ""),  # of an export that needs no base
])  # fmt: skip
def test_another_base_is_named(path, saved, now, named, capsys):
    (path / "state.json").write_text(json.dumps(STATE | {"base": saved}))
    if not named:
        load_checkpoint(path, *trained(), now)
        unchecked = isinstance(saved, dict) and len(saved.get("a", "")) == 64
        assert ("Not checked: whether a is the base" in capsys.readouterr().out) == unchecked
        return
    with pytest.raises(UserError, match=f"The weights of {named} "):
        load_checkpoint(path, *trained(), now)
