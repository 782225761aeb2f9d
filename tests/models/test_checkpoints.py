"""Checkpoints run nothing that lies in them, and are read back before they have their name."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import random_policy
from safetensors.torch import load_file, save_file

from config.errors import UserError
from config.options import RunConfig
from models import checkpoints
from models.checkpoints import base_digests, best_step, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected")
STATE = {"base": {}, "dtype": "float32", "position": 7, "done_steps": 1}


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


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("os", "system", "touch ran"),
        ("posix", "system", "touch ran"),
        ("subprocess", "getoutput", "touch ran"),
        ("builtins", "eval", RAN),
        ("builtins", "exec", RAN),
        ("builtins", "getattr", "ran"),
        ("torch.serialization", "os.system", "touch ran"),  # by way of a module that is named
        ("torch.distributed.checkpoint.filesystem", "os.system", "touch ran"),
        ("torch.distributed.checkpoint.metadata", "os.system", "touch ran"),
        ("torch", "os.system", "touch ran"),
        ("torch", "load", "run/checkpoints/step-1/.metadata"),
        ("pathlib", "Path", "ran"),
    ],
)
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


# ---------------------------------------------------------------- what is read back


def weight(copy, folder):
    copy["weights"]["1.weight"][1, 5] *= 1 + 2e-7


def moment(copy, folder):
    copy["optimizer"]["state"]["0.bias"]["exp_avg_sq"] *= 1.00001


def rate(copy, folder):
    copy["optimizer"]["param_groups"][0]["lr"] = 0.2


def cut(copy, folder):
    os.truncate(folder / "__0_0.distcp", 999)


def emptied(copy, folder):
    (folder / ".metadata").write_bytes(b"")


@pytest.mark.parametrize("change", [weight, moment, rate, cut, emptied])
def test_what_is_not_read_back_gets_no_name_and_leaves_the_one_before(path, monkeypatch, change):
    save = dcp.save

    def save_otherwise(state_dict, checkpoint_id, **more):
        copy, later = contents(*trained()), change in (cut, emptied)
        with torch.no_grad():
            later or change(copy, checkpoint_id)
        save(copy, checkpoint_id=checkpoint_id, **more)
        later and change(copy, checkpoint_id)

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(dcp, "save", save_otherwise)
        save_checkpoint(path.with_name("step-2"), *trained(), STATE | {"done_steps": 2})
    assert {file.name for file in path.parent.iterdir()} == {"step-1"}
    theirs = trained(seed=1)
    load_checkpoint(path, *theirs)
    assert values(*theirs) == values(*trained())


def test_a_weight_that_is_no_number_is_read_back_as_what_it_is(path):
    model, optimizer = trained()
    with torch.no_grad():
        model[0].bias[2] = float("nan")
    save_checkpoint(path.with_name("step-2"), model, optimizer, STATE)


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


@pytest.fixture
def base(codec, tmp_path):
    random_policy(codec).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def digest(model):
    ((name, found),) = base_digests(RunConfig(model=str(model)), model, True).items()
    assert name == str(model)
    return found


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda w: dict(reversed(w.items())), True),
        (lambda w: w | {max(w): w[max(w)] + 1e-4}, False),
        (lambda w: {k: v.bfloat16() for k, v in w.items()}, False),
        (lambda w: {k: v.reshape(1, *v.shape) for k, v in w.items()}, False),
        (lambda w: {f"{k}.": v for k, v in w.items()}, False),
        (lambda w: w | {"more": torch.zeros(1)}, False),
        (lambda w: w | {"more": torch.zeros(())}, False),
    ],
)
def test_a_base_is_told_by_all_its_weights(base, change, same):
    before, file = digest(base), base / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    for k, (name, value) in enumerate(change(weights).items()):  # in one file or several
        save_file({name: value}, base / f"model-{k}.safetensors", {"other": "metadata"})
    assert (digest(base) == before) == same


def test_only_what_a_training_needs_is_digested(base, tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    run = RunConfig(model=str(base), adapter=str(tmp_path))
    names = [
        {*base_digests(run, base, adapters, reference)}
        for adapters, reference in ((0, 0), (4, 0), (0, 0.1), (4, 0.1))
    ]
    assert names == [set(), {str(base)}, *[{str(base), str(tmp_path)}] * 2]
    embedded = base_digests(RunConfig(), "tiny", True)
    assert [*embedded] == ["the embedded policy"]
    assert embedded == base_digests(RunConfig(model="tiny"), "tiny", True)


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        ({"a": "1"}, {"a": "1"}, ""),
        ({"a": "1"}, {"a": "2"}, "a"),
        ({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, "b"),
        ({}, {"a": "2"}, ""),
        ([0.01, 0.02], {"a": "2"}, ""),  # of an earlier version
        ({"a": "1"}, {}, ""),  # of an export that needs no base
    ],
)
def test_another_base_is_named(path, saved, now, named):
    (path / "state.json").write_text(json.dumps(STATE | {"base": saved}))
    if not named:
        load_checkpoint(path, *trained(), now)
        return
    with pytest.raises(UserError, match=f"The weights of {named} "):
        load_checkpoint(path, *trained(), now)
